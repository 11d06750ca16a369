"""Draws pictures and clips with the models of a run or a folder."""
