"""From the candidates of a search to the chosen plan: near-ties, alternatives, reasons and advice."""
