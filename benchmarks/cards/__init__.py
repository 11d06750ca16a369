"""What people own: big models on small and on large machines, simulated on analytic profiles."""
