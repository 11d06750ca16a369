"""`make torture`; see README.md in this folder."""

import sys

from torture.mounts import in_own_namespace

if __name__ == "__main__":
    in_own_namespace()  # starts this program again, so before the imports that take seconds
    from diffusionpipe.cli.verbs.output import quieten

    quieten()
    from torture.program import main

    sys.exit(main())
