"""Which parameter holds which tensor of the checkpoint, and the taps that show it."""
