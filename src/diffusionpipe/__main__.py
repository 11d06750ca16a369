"""`python -m diffusionpipe` is the command `diffusionpipe`."""

from diffusionpipe.cli import main

if __name__ == "__main__":
    main()
