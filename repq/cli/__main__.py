"`python -m repq.cli` is `repq`"
import sys
from repq.cli.command import main

if __name__ == '__main__': sys.exit(main())
