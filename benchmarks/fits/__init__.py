"""Whether the models of 2026 fit on 2, 4 and 8 cards, and how they are trained there."""
