"""Folders of jobs, while several programs write and read them, under any name, with files of others in them."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import polars as pl
import pytest
from trace_builder import graph_of, repeated

import lumos_nb as ln
from lumos_nb import _job_files, whole_files
from lumos_nb.errors import RunError


@pytest.mark.parametrize("name", ["~", "~/job", "file:/job", "a[1]*?", "{a,b}", "a\nb", "%41", "s3:/job"])
def test_a_job_lies_in_just_the_folder_that_was_named(name, tmp_path, monkeypatch):
    """Of some of these polars would write elsewhere: into the user's home, or below the root."""
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    graph = graph_of(repeated(lambda trace, step, at: trace.op("aten::mm", at + 100, at + 900)), step=2)
    assert ln.save_job(graph, name).replay().step_ns == ln.replay(graph).step_ns
    assert ln.open_job(here / name).replay().breakdown().equals(ln.breakdown(graph))
    assert not [*home.iterdir()]


@pytest.fixture
def steps():
    """Graphs of alike shape, of which one takes longer."""
    trace = repeated(lambda trace, step, at: trace.op("aten::mm", at + 100, at + 100 + 100 * step))
    return graph_of(trace, step=2), graph_of(trace, step=3)


def test_a_job_is_that_which_was_written_whatever_another_writer_puts_there(steps, tmp_path, monkeypatch):
    first, second = steps
    replaced = _job_files.replaced

    @contextmanager
    def overtaken(folder):
        with replaced(folder) as made:
            yield made
        monkeypatch.undo()
        ln.save_job(second, folder)

    monkeypatch.setattr(_job_files, "replaced", overtaken)
    job = ln.save_job(first, tmp_path)
    with pytest.raises(RunError, match="has changed since the job was written"):
        job.replay()
    assert ln.open_job(tmp_path).replay().step_ns == ln.replay(second).step_ns


def test_a_plan_is_not_put_into_a_job_that_took_the_place_of_its_own(steps, tmp_path, monkeypatch):
    """Files of two plans would be sealed as one, or the times of one job be said of the other."""
    first, second = steps
    job, planned = ln.save_job(first, tmp_path), _job_files.Files._planned

    def overtaken(files):
        plan = planned(files)
        monkeypatch.undo()
        ln.save_job(second, tmp_path)
        return plan

    monkeypatch.setattr(_job_files.Files, "_planned", overtaken)
    with pytest.raises(RunError, match="has been replaced since it was opened: open it anew"):
        job.replay()
    assert not (tmp_path / "plan").exists()
    assert ln.open_job(tmp_path).replay().step_ns == ln.replay(second).step_ns


def test_a_table_is_of_the_file_that_was_checked(steps, tmp_path, monkeypatch):
    job, path, table_in = ln.save_job(steps[0], tmp_path), tmp_path / "ops-00000.parquet", _job_files.table_in
    right = job.ops_of(0)

    def overtaken(file, *of):
        with whole_files.whole(path) as part:
            right.with_columns(dur_ns=pl.col("dur_ns") + 1).write_parquet(part)
        return table_in(file, *of)

    monkeypatch.setattr(_job_files, "table_in", overtaken)
    assert job.ops_of(0).equals(right)
    with pytest.raises(RunError, match="has changed since"):
        job.ops_of(0)


def test_a_job_that_is_being_replaced_is_opened_when_the_new_one_is_there(steps, tmp_path, monkeypatch):
    first, second = steps
    ln.save_job(first, tmp_path)
    remove_others, opened = _job_files._remove_others, []

    def slow(folder, ranks):
        if folder == tmp_path:
            opened.append(pool.submit(ln.open_job, tmp_path))
            time.sleep(0.1)
            assert not opened[0].done()
        remove_others(folder, ranks)

    monkeypatch.setattr(_job_files, "_remove_others", slow)
    with ThreadPoolExecutor(1) as pool:
        ln.save_job(second, tmp_path)
        assert opened[0].result().replay().step_ns == ln.replay(second).step_ns


@pytest.mark.parametrize("name", ["ops-00099.parquet", "plan/dur_ns.npy", "plan/seals.json", "replayed/start_ns.npy"])
def test_folders_of_others_under_names_of_a_jobs_files_stay(name, steps, tmp_path):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "mine.txt").write_text("mine")
    ln.save_job(steps[0], tmp_path)
    assert ln.open_job(tmp_path).ranks.height == 1
    assert (tmp_path / name / "mine.txt").read_text() == "mine"


def test_a_job_in_a_folder_that_may_not_be_listed_is_read(steps, tmp_path, monkeypatch):
    expected, opens = ln.save_job(steps[0], tmp_path).replay().step_ns, os.open

    def refused(path, *given):
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opens(path, *given)

    monkeypatch.setattr(os, "open", refused)
    assert ln.open_job(tmp_path).replay().step_ns == expected
    with pytest.raises(RunError, match="cannot be written: Permission denied"):
        ln.save_job(steps[1], tmp_path)
    monkeypatch.undo()
    assert ln.open_job(tmp_path).replay().step_ns == expected
