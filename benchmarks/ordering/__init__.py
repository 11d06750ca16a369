"""How far the searched orders are from the best ones."""
