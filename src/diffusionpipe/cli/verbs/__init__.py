"""The commands, a module each, and the options that several of them share: they parse, call `workflows` and print."""
