"""What commands print of a checkpoint."""
