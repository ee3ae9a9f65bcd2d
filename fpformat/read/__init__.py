"""From files to values: opening, reading, verifying, digests of what was read."""
