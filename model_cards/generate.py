"""Writes the cards of the bundled drafters from their records, beside the weights, with `template.md`.

    python model_cards/generate.py

Run it after a drafter was trained or measured; `tests/test_model_cards.py` fails until then.
"""

from pathlib import Path

from hf_specdec import load_drafter

PROJECT = Path(__file__).parent.parent

for config in sorted(PROJECT.glob("examples/*/*/config.json")):
    folder = config.parent
    if folder.name == "target":
        continue
    name = folder.relative_to(PROJECT).as_posix()
    drafter = load_drafter(folder)
    drafter.write_records(folder, name)  # keeps a README.md that was edited
    print(f"{name}: {'measured' if drafter.measurements else 'not measured'}")
