"""Publish a drafter: repo, weights, records, model card, tag, and the code for `custom_generate`.

    python examples/push_drafter.py my-drafter me/my-drafter --target owner/target --tag v1

It inspects the files first, and uploads only what `load_drafter` would load. Log in with `hf auth login` before, or set
HF_TOKEN. Anyone can then load it with `load_drafter("me/my-drafter", target=model)`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hf_specdec import inspect_drafter, load_drafter


def main(argv: Sequence[str] | None = None) -> None:
    """Inspects, loads, names the target, pushes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", help="folder of a drafter, as save_pretrained wrote it")
    parser.add_argument("repo", help="owner/name on the Hub; created if it does not exist")
    parser.add_argument("--target", help="Hub id of the target, if the drafter was trained on a local copy")
    parser.add_argument("--target-revision", help="commit or branch of the target")
    parser.add_argument("--tag", help="git tag for this version, such as v1")
    parser.add_argument("--license", help="Hub licence id, such as apache-2.0; the training record's by default")
    parser.add_argument("--private", action="store_true", help="make a repo that is created private")
    arguments = parser.parse_args(argv)

    found = inspect_drafter(arguments.drafter)
    print(found)
    if found.problems:
        raise SystemExit("Not published: fix the problems above first.")

    drafter = load_drafter(arguments.drafter)
    if arguments.target:
        drafter.config.target_name_or_path = arguments.target
    if arguments.target_revision:
        drafter.config.target_revision = arguments.target_revision
    try:
        commit = drafter.push_to_hub(
            arguments.repo,
            private=arguments.private or None,
            license=arguments.license,
            tag=arguments.tag,
        )
    except (OSError, ValueError) as error:  # such as a tag that exists; says what was uploaded, and the way out
        raise SystemExit(f"{error}") from error
    print(f"Published: {commit.commit_url}")


if __name__ == "__main__":
    main()
