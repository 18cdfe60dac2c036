import sys

from k2i_jax.cli import main

sys.exit(main())
