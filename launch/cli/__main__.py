"""`python -m dpcfl_net.launch.cli`: the command line."""

from dpcfl_net.launch.cli import main

if __name__ == "__main__":
    main()
