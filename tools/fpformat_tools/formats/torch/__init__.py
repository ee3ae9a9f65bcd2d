"""Files of ``torch.save`` as an input and as an output, without torch."""
