"""`python -m diffusionpipe` is the command `diffusionpipe`."""

import sys

if __name__ == "__main__":
    try:
        from diffusionpipe.cli import main
    except KeyboardInterrupt:  # the command's own word on it is not loaded yet
        sys.exit(130)
    main()
