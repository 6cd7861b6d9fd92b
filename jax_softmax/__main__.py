"""`python -m jax_softmax`: the doctor."""

import argparse
import sys

from jax_softmax.runtime import doctor

if __name__ == "__main__":
    argparse.ArgumentParser("python -m jax_softmax", description=doctor.__doc__).parse_args()
    sys.exit(doctor.main())
