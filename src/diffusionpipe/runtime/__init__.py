"""Plan -> gradients: mesh, transport, stages, executor, trace."""
