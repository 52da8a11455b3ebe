"""What the notebooks store is one clean run; `.ci/run` runs them again."""

import glob
import json
import os

import pytest

_HERE = os.path.dirname(os.path.abspath(__file__))
NOTEBOOKS = sorted(glob.glob(os.path.join(_HERE, "..", "notebooks",
                                          "*.ipynb")))


def code_cells(path):
    with open(path, encoding="utf-8") as file:
        cells = json.load(file)["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_there_are_notebooks():
    assert [os.path.basename(path) for path in NOTEBOOKS] == [
        "legacy_codebase.ipynb", "walkthrough.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=os.path.basename)
def test_stored_outputs_are_of_one_clean_run(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(
        range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert "error" not in [output["output_type"] for output in outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    # Nor does a stored output tell where it was run.
    assert not [output for output in outputs
                if "site-packages" in json.dumps(output)]
