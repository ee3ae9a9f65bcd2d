"""What must hold: the rules within a segment's tables, across segments, and between tensors."""
