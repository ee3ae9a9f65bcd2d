"""What the bytes are: frozen records, and how each stands on disk."""
