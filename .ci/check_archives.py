"""Check what is in the wheel and in the source distribution.

Usage: check_archives.py WHEEL WHEEL_BUILT_FROM_THE_TREE SDIST
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"looped_spec": ROOT / "looped_spec"} | {
    folder.name: folder for folder in sorted((ROOT / "adapters").glob("*/looped_spec_*"))
}
DEMOS = {package for package in PACKAGES if package != "looped_spec"}
DEMO = {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
UNWANTED = ("tests", "shared", "__pycache__", ".venv", "golden")


def names_of_wheel(path: str) -> list[str]:
    """Return the names of the files in a wheel."""
    with zipfile.ZipFile(path) as wheel:
        return wheel.namelist()


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder, which may be a link, and of those within it."""
    return [path for path in folder.rglob("*") if path.is_file()]


def main(wheel: str, wheel_from_tree: str, sdist: str) -> None:
    """Raise for the first thing that is amiss."""
    names = names_of_wheel(wheel)
    assert len(names) == len(set(names)), "the wheel holds a file twice"
    assert sorted(names) == sorted(names_of_wheel(wheel_from_tree)), "the two wheels differ"
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES), tops
    for package, folder in PACKAGES.items():
        files = [*folder.rglob("*.py"), *folder.rglob("*.tmpl"), *_files(folder / "presets")]
        files += folder.glob("serve/page/*")
        inside = {f"{package}/{file.relative_to(folder).as_posix()}" for file in files}
        assert inside <= set(names), f"not in the wheel: {inside - set(names)}"
    missing = {f"{package}/demo/{name}" for package in DEMOS for name in DEMO} - set(names)
    assert not missing, f"the demos lack {missing}"
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() for member in members), "the source distribution holds a link"
    packed = [member.name.partition("/")[2] for member in members]
    for listing in (names, packed):
        parts = {part for name in listing for part in name.split("/")}
        assert not parts & set(UNWANTED), parts & set(UNWANTED)
    assert any("/presets/model=" in name for name in names), "the wheel holds no preset"
    presets = [name for name in names if "/presets/" in name]
    sources = [name for name in packed if "presets" in name.split("/")]
    assert len(presets) == len(sources), f"wheel {presets}, source distribution {sources}"
    size = Path(wheel).stat().st_size / 2**20
    print(f"{Path(wheel).name}: {len(names)} files, {size:.1f} MiB, {len(presets)} of them presets")


if __name__ == "__main__":
    main(*sys.argv[1:])
