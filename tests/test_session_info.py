"""What the last cell of a notebook states."""

from __future__ import annotations

import platform

import lumos_nb
from lumos_nb import session
from lumos_nb.session import session_info


def stated(*data):
    return dict(session_info(*data).iter_rows())


def test_versions_are_those_of_this_process(monkeypatch):
    monkeypatch.setattr(session, "PACKAGES", ("lumos-nb", "no-such-package"))
    assert stated() == {
        "Python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "lumos-nb": lumos_nb.__version__,
        "no-such-package": "not installed",
    }


def test_data_is_stated_by_names_and_contents_but_not_by_its_cache(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "rank-0.json").write_text("{}")
    before = stated(run)["run"]
    assert before.startswith("sha256:")
    (run / ".lumos_cache").mkdir()
    (run / ".lumos_cache" / "parsed").write_text("x")
    assert stated(run)["run"] == before
    (run / "rank-0.json").rename(run / "rank-1.json")
    renamed = stated(run)["run"]
    (run / "rank-1.json").write_text("[]")
    assert len({before, renamed, stated(run)["run"]}) == 3


def test_a_single_file_is_data_too(tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n")
    assert stated(tmp_path / "table.csv")["table.csv"].startswith("sha256:")
