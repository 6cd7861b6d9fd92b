"""`python -m jax_softmax`: the doctor."""

import sys

from jax_softmax.runtime import doctor

if __name__ == "__main__":
    sys.exit(doctor.main())
