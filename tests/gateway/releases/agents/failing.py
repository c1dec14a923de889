"""An agent that does not want to."""

import sys

print("I do not feel like it", file=sys.stderr)
sys.exit(3)
