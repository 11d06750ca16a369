"""The paper's comparison, simulated on analytic profiles."""
