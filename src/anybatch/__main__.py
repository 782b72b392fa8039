"""``python -m anybatch`` is the command ``anybatch``."""

from anybatch.cli.main import main

if __name__ == "__main__":
    main(prog_name="anybatch")
