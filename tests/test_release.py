# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Contents of the files of a release. `make release-check` tests an installed one."""

from pathlib import Path
import zipfile

import pytest

import release_check
import release_files

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release_files.build("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_only_the_package(wheel: Path) -> None:
    assert not release_files.wheel_faults(wheel)


def test_faults_of_a_wheel_are_found(wheel: Path, tmp_path: Path) -> None:
    faulty = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(faulty, "w") as target:
        for name in source.namelist():
            if name != "ebmpp/py.typed":
                text = source.read(name)
                target.writestr(name, text.replace(b"\nVersion: ", b"\nVersion: 9."))
        target.writestr("tests/test_release.py", "")
    faults = release_files.wheel_faults(faulty)
    assert [f.split(",")[0] for f in faults] == [
        "lacks ebmpp/py.typed",
        "has tests/test_release.py",
        f"Version is 9.{release_files.VERSION}",
    ]


def test_the_sdist_holds_all_that_its_tests_read(tmp_path: Path) -> None:
    assert not release_files.sdist_faults(release_files.build("sdist", tmp_path))


def test_no_module_repeats_the_version() -> None:
    number = f'"{release_files.VERSION}"'
    assert not [
        p
        for p in (release_files.ROOT / "ebmpp").rglob("*.py")
        if number in p.read_text("utf-8")
    ]


def test_a_release_is_checked_on_its_pythons() -> None:
    versions = [
        c.rsplit(" ", 1)[1]
        for c in release_files.PROJECT["classifiers"]
        if ":: Python :: 3." in c
    ]
    assert set(versions) <= set(release_check.VERSIONS)


def test_the_table_reports_failed_and_skipped_checks() -> None:
    table = release_check.Table()
    with table.row("build", "3.11") as row:
        row.note = "2 files"
    with table.row("readme", "3.11"):
        raise release_check.CheckFailed("line 3: no\nsuch thing")
    table.skip("readme", "3.14", "no such interpreter here")
    assert [row.result for row in table.rows] == ["ok", "FAILED", "skipped"]
    assert table.failed
    text = str(table)
    assert (
        "2 files" in text
        and "such thing" in text
        and "no such interpreter here" in text
    )
