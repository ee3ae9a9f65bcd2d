"""What people type: one module for each command, and what commands have in common."""
