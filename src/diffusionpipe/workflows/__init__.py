"""Planning and execution joined: what a command or a library call does, without printing anything."""
