"""The checkpoints of a run: background saves, the newest, those that stay, going back."""
