"""`make doctor-faults`; see README.md in this folder."""

import sys

from doctor_faults.program import main

if __name__ == "__main__":
    sys.exit(main())
