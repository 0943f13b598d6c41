"""What is shipped works where it lands: wheel, sdist, checkout."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mtpdeploy.resources import bundled

ROOT = Path(__file__).resolve().parent.parent


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    import shutil

    source = tmp_path_factory.mktemp("source") / "mtpdeploy"
    skip = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", "runs", ".*_cache", ".gpu"
    )
    shutil.copytree(ROOT, source, ignore=skip, symlinks=True)
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, source, cwd=folder)
    return folder


def shipped() -> set[str]:
    return {
        f"{kind}/{path.relative_to(bundled(kind))}"
        for kind, suffix in (("templates", ".j2"), ("inventories", ".yml"))
        for path in bundled(kind).rglob(f"*{suffix}")
    }


def test_a_checkout_finds_its_own_folders() -> None:
    assert bundled("templates") == ROOT / "templates"
    assert "inventories/profiles/mtp.yml" in shipped()


@pytest.mark.slow
def test_the_wheel_holds_every_template_inventory_and_table(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"mtpdeploy/{name}" for name in shipped()}
    wanted |= {
        str(path.relative_to(ROOT))
        for path in (ROOT / "mtpdeploy").rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.suffix in (".py", ".json", ".jsonl", ".typed", ".j2")
    }
    assert wanted - names == set()


@pytest.mark.slow
def test_the_sdist_holds_what_a_build_and_a_reader_need(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "setup.py",
        "setup.cfg",
        "fabfile.py",
        "LICENSE",
        "README.md",
        "Makefile",
        "tests/test_packaging.py",
    } <= names
    assert shipped() <= names


@pytest.mark.slow
def test_an_installed_wheel_works_in_an_empty_folder(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    # The dependencies are this environment's; mtpdeploy itself must come from the wheel.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=tmp_path).strip())
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    libraries = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "dependencies.pth").write_text(f"{libraries}\n")
    empty = tmp_path / "home"
    empty.mkdir()
    where = run(python, "-c", "import mtpdeploy; print(mtpdeploy.__file__)", cwd=empty)
    assert where.startswith(str(tmp_path)), where
    listed = run(python, "-m", "mtpdeploy", "--home", empty, "profiles", cwd=empty)
    assert "mtp-throughput" in listed
    rendered = run(
        python,
        "-c",
        "from mtpdeploy.resources import environment; print(sorted(environment().list_templates()))",
        cwd=empty,
    )
    assert "launch.sh.j2" in rendered


def test_the_lock_has_a_version_that_fits_each_dependency() -> None:
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    wanted = declared["options"]["install_requires"] + declared["options.extras_require"]["dev"]
    pins = [Requirement(line) for line in (ROOT / "requirements-dev.lock").read_text().split()]
    locked = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    needed = [Requirement(line) for line in wanted.split("\n") if line.strip()]
    assert len(needed) > 20
    wrong = [str(each) for each in needed if locked.get(canonicalize_name(each.name), "none") not in each.specifier]
    assert wrong == []
