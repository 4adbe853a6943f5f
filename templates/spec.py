"""The Flex Template's spec: the JSON object on Cloud Storage that a launch request points at. In the repository's root:

    python -m templates.spec --image REGION-docker.pkg.dev/PROJECT/headrace/rollouts:TAG \\
        --out gs://BUCKET/templates/rollouts.json

Written here and not by `gcloud dataflow flex-template build`, which drops the metadata's streaming fields and accepts
parameter types that do not exist. Invariant: what is written parses strictly as google.dataflow.v1beta3.ContainerSpec.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pipelines.cloud import CloudSettings, LaunchError, check_message, google_errors, job_environment
from trajectories.storage import open_storage

METADATA = Path(__file__).parent / "metadata.json"


def container_spec(image: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """ContainerSpec of `image`; raises ValueError for an image without a fixed tag and for invalid metadata."""
    CloudSettings(image=image)  # refuses an image whose tag may move
    spec = {
        "image": image,
        "sdkInfo": {"language": "PYTHON"},
        "metadata": metadata,
        "defaultEnvironment": job_environment(
            image, at_least_once=metadata.get("defaultStreamingMode") == "AT_LEAST_ONCE"
        ),
    }
    check_message("ContainerSpec", spec)
    return spec


def main(argv: list[str] | None = None) -> int:
    """Write the spec to --out, or print it."""
    parser = argparse.ArgumentParser(prog="python -m templates.spec", description="Write the Flex Template's spec.")
    parser.add_argument("--image", required=True, help="image of launcher and workers, with its tag or digest")
    parser.add_argument("--out", help="gs://bucket/….json or a file (default: print it)")
    args = parser.parse_args(argv)
    try:
        text = json.dumps(container_spec(args.image, json.loads(METADATA.read_text())), indent=2) + "\n"
        if not args.out:
            print(text, end="")
            return 0
        folder, _, name = args.out.rpartition("/")
        with google_errors():
            open_storage(folder or ".").write(name, text.encode())
    except (LaunchError, ValueError, OSError) as error:
        print(f"templates.spec: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
