"""What is advised where an optional package is missing: in a clone, and elsewhere."""

from __future__ import annotations

from pathlib import Path

from headway.extras import how_to_get


def test_a_clone_installs_an_extra_from_itself(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    assert how_to_get("torch", tmp_path / "src/headway") == f"install it by pip install -e '.[torch]' in {tmp_path}"


def test_an_installed_package_gets_its_extra_by_the_name_of_the_distribution(tmp_path: Path) -> None:
    installed = tmp_path / "lib/python3.13/site-packages/headway"
    (tmp_path / "lib/python3.13").mkdir(parents=True)
    (tmp_path / "lib/python3.13/pyproject.toml").write_text("")  # of something else
    assert how_to_get("cuda", installed) == "install it by pip install 'headway-llm[cuda]'"


def test_this_package_is_part_of_a_clone() -> None:
    assert how_to_get("torch").endswith(str(Path(__file__).resolve().parents[1]))
