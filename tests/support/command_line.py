"""The command `aaconv`, run in this process."""

from aaconv import cli


def run(*arguments):
    """The exit code, whether argparse leaves or main returns."""
    try:
        return cli.main(arguments)
    except SystemExit as leaving:
        return leaving.code or 0


def error_of(capsys, *arguments):
    """The one line an error prints."""
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("aaconv: error: ")
    assert printed.err.count("\n") == 1
    return printed.err
