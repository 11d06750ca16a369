"""Planning and execution joined: the work of a command or a library call, without printing anything."""
