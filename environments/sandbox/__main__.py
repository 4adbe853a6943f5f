"""`python -m environments.sandbox`: starts a sandbox and prints what is in force on this host."""

from __future__ import annotations

import argparse
import json
import sys

from environments.sandbox.client import Interpreter, Sandbox, SandboxError, SandboxSettings
from environments.sandbox.server import Layer


def main(argv: list[str] | None = None) -> int:
    """0 if code is run protected, 1 if it would be unprotected, 2 if it cannot be run at all."""
    parser = argparse.ArgumentParser(prog="python -m environments.sandbox", description=__doc__)
    parser.add_argument("--probe", action="store_true", help="what it does anyway")
    parser.add_argument("--interpreter", choices=list(Interpreter), help="only this one (both)")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each interpreter")
    arguments = parser.parse_args(argv)
    worst = 0
    for interpreter in [Interpreter(arguments.interpreter)] if arguments.interpreter else Interpreter:
        sandbox = Sandbox(SandboxSettings(interpreter=interpreter, slots=1, unprotected=True))
        try:
            protection = sandbox.start()
        except SandboxError as error:
            worst = 2
            found = {"interpreter": interpreter, "protected": False, "error": str(error)}
            print(json.dumps(found) if arguments.json else f"python sandbox, {interpreter} interpreter: {error}")
            continue
        finally:
            sandbox.close()
        worst = max(worst, bool(protection.gaps))
        if arguments.json:
            layers = {str(layer): layer in protection.layers for layer in Layer}
            found = {
                "interpreter": interpreter,
                "protected": not protection.gaps,
                "layers": layers,
                "missing": dict(protection.missing),
            }
            print(json.dumps(found))
        else:
            print(protection.describe())
    return worst


if __name__ == "__main__":
    sys.exit(main())
