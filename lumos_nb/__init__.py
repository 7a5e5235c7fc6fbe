"""Why a training step takes as long as it does, and what it would take otherwise.

The public names load their module when first used, so that `import lumos_nb` takes no time. A new name goes into
`_MODULES` and under `TYPE_CHECKING`; a test compares the two, and keeps modules from bearing the name of a function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lumos_nb.beside import timed_steps as timed_steps
    from lumos_nb.config import Fabric as Fabric
    from lumos_nb.config import Gpu as Gpu
    from lumos_nb.config import find_fabric as find_fabric
    from lumos_nb.config import find_gpu as find_gpu
    from lumos_nb.costs.calibration import Calibration as Calibration
    from lumos_nb.costs.calibration import load_calibration as load_calibration
    from lumos_nb.costs.embedding_net import LookupNet as LookupNet
    from lumos_nb.costs.embeddings import PhysicalLookup as PhysicalLookup
    from lumos_nb.costs.fitting import calibrate as calibrate
    from lumos_nb.costs.host import overheads as overheads
    from lumos_nb.costs.lookups import lookup_us as lookup_us
    from lumos_nb.costs.samples import kernel_samples as kernel_samples
    from lumos_nb.critical_path import Result as Result
    from lumos_nb.critical_path import replay as replay
    from lumos_nb.critical_path import sweep as sweep
    from lumos_nb.embedding_tables import complete_tables as complete_tables
    from lumos_nb.embedding_tables import reuse_factor as reuse_factor
    from lumos_nb.engine import Pool as Pool
    from lumos_nb.engine import Resources as Resources
    from lumos_nb.engine import simulate as simulate
    from lumos_nb.evaluate import delayed_steps as delayed_steps
    from lumos_nb.evaluate import mechanistic as mechanistic
    from lumos_nb.evaluate import score_waits as score_waits
    from lumos_nb.evaluate import what_ifs as what_ifs
    from lumos_nb.fake_group import DryRun as DryRun
    from lumos_nb.fake_group import dry_run as dry_run
    from lumos_nb.findings import exposed_communication as exposed_communication
    from lumos_nb.findings import neighbours as neighbours
    from lumos_nb.findings import waits_for as waits_for
    from lumos_nb.graph import Graph as Graph
    from lumos_nb.graph import Recording as Recording
    from lumos_nb.graph import build_graph as build_graph
    from lumos_nb.jobs import open_job as open_job
    from lumos_nb.jobs import save_job as save_job
    from lumos_nb.labels import ddp_hook as ddp_hook
    from lumos_nb.layout import Cluster as Cluster
    from lumos_nb.layout import Parallelism as Parallelism
    from lumos_nb.layout import Training as Training
    from lumos_nb.ledger import check_prediction as check_prediction
    from lumos_nb.ledger import read_ledger as read_ledger
    from lumos_nb.ledger import save_prediction as save_prediction
    from lumos_nb.ops import build_ops as build_ops
    from lumos_nb.partition import activity as activity
    from lumos_nb.partition import breakdown as breakdown
    from lumos_nb.partition import compare as compare
    from lumos_nb.rankwise import load_job as load_job
    from lumos_nb.recorder import Recorder as Recorder
    from lumos_nb.recorder import capture as capture
    from lumos_nb.report import step_report as step_report
    from lumos_nb.resampling import jitter as jitter
    from lumos_nb.resampling import step_interval as step_interval
    from lumos_nb.steady import repeat as repeat
    from lumos_nb.stragglers import waiting_caused as waiting_caused
    from lumos_nb.stragglers import with_pooled_durations as with_pooled_durations
    from lumos_nb.stragglers import without_stragglers as without_stragglers
    from lumos_nb.symmetry import fill_ranks as fill_ranks
    from lumos_nb.traces.execution_trace import ExecutionTrace as ExecutionTrace
    from lumos_nb.traces.execution_trace import load_execution_trace as load_execution_trace
    from lumos_nb.traces.perfetto import write_perfetto as write_perfetto
    from lumos_nb.traces.run import Run as Run
    from lumos_nb.traces.run import load_run as load_run
    from lumos_nb.transformer import Mla as Mla
    from lumos_nb.transformer import Moe as Moe
    from lumos_nb.transformer import Transformer as Transformer
    from lumos_nb.workloads.dlrm.estimates import DlrmEstimate as DlrmEstimate
    from lumos_nb.workloads.dlrm.estimates import estimate_dlrm as estimate_dlrm
    from lumos_nb.workloads.dlrm.model import Dlrm as Dlrm
    from lumos_nb.workloads.dlrm.model import DlrmTraining as DlrmTraining
    from lumos_nb.workloads.dlrm.plan import Plan as Plan
    from lumos_nb.workloads.dlrm.pretraining import pretrain as pretrain
    from lumos_nb.workloads.dlrm.rescaling import rescale_batch as rescale_batch
    from lumos_nb.workloads.dlrm.sharding import shard as shard
    from lumos_nb.workloads.dlrm.sharding_costs import ShardingCosts as ShardingCosts
    from lumos_nb.workloads.dlrm.table_rows import estimate_dlrm_row as estimate_dlrm_row
    from lumos_nb.workloads.llm.estimates import Estimate as Estimate
    from lumos_nb.workloads.llm.estimates import estimate as estimate
    from lumos_nb.workloads.llm.rewriting import rewrite as rewrite
    from lumos_nb.workloads.llm.screening import Found as Found
    from lumos_nb.workloads.llm.screening import search as search
    from lumos_nb.workloads.llm.structure import Structure as Structure
    from lumos_nb.workloads.llm.structure import find_structure as find_structure
    from lumos_nb.workloads.llm.table_rows import estimate_row as estimate_row
    from lumos_nb.workloads.llm.table_rows import read_row as read_row
    from lumos_nb.workloads.surcharges import Surcharges as Surcharges

_MODULES = {
    "lumos_nb.traces.run": ("Run", "load_run"),
    "lumos_nb.traces.perfetto": ("write_perfetto",),
    "lumos_nb.traces.execution_trace": ("ExecutionTrace", "load_execution_trace"),
    "lumos_nb.beside": ("timed_steps",),
    "lumos_nb.ops": ("build_ops",),
    "lumos_nb.graph": ("Graph", "Recording", "build_graph"),
    "lumos_nb.steady": ("repeat",),
    "lumos_nb.critical_path": ("Result", "replay", "sweep"),
    "lumos_nb.partition": ("activity", "breakdown", "compare"),
    "lumos_nb.jobs": ("open_job", "save_job"),
    "lumos_nb.rankwise": ("load_job",),
    "lumos_nb.engine": ("Pool", "Resources", "simulate"),
    "lumos_nb.stragglers": ("waiting_caused", "with_pooled_durations", "without_stragglers"),
    "lumos_nb.evaluate": ("delayed_steps", "mechanistic", "score_waits", "what_ifs"),
    "lumos_nb.findings": ("exposed_communication", "neighbours", "waits_for"),
    "lumos_nb.resampling": ("jitter", "step_interval"),
    "lumos_nb.symmetry": ("fill_ranks",),
    "lumos_nb.config": ("Fabric", "Gpu", "find_fabric", "find_gpu"),
    "lumos_nb.transformer": ("Mla", "Moe", "Transformer"),
    "lumos_nb.layout": ("Cluster", "Parallelism", "Training"),
    "lumos_nb.workloads.dlrm.estimates": ("DlrmEstimate", "estimate_dlrm"),
    "lumos_nb.workloads.dlrm.model": ("Dlrm", "DlrmTraining"),
    "lumos_nb.workloads.dlrm.rescaling": ("rescale_batch",),
    "lumos_nb.workloads.dlrm.table_rows": ("estimate_dlrm_row",),
    "lumos_nb.workloads.llm.estimates": ("Estimate", "estimate"),
    "lumos_nb.workloads.llm.rewriting": ("rewrite",),
    "lumos_nb.workloads.llm.structure": ("Structure", "find_structure"),
    "lumos_nb.workloads.llm.screening": ("Found", "search"),
    "lumos_nb.workloads.surcharges": ("Surcharges",),
    "lumos_nb.workloads.llm.table_rows": ("estimate_row", "read_row"),
    "lumos_nb.workloads.dlrm.plan": ("Plan",),
    "lumos_nb.workloads.dlrm.pretraining": ("pretrain",),
    "lumos_nb.workloads.dlrm.sharding": ("shard",),
    "lumos_nb.workloads.dlrm.sharding_costs": ("ShardingCosts",),
    "lumos_nb.costs.calibration": ("Calibration", "load_calibration"),
    "lumos_nb.costs.embedding_net": ("LookupNet",),
    "lumos_nb.costs.embeddings": ("PhysicalLookup",),
    "lumos_nb.costs.lookups": ("lookup_us",),
    "lumos_nb.embedding_tables": ("complete_tables", "reuse_factor"),
    "lumos_nb.costs.fitting": ("calibrate",),
    "lumos_nb.costs.host": ("overheads",),
    "lumos_nb.costs.samples": ("kernel_samples",),
    "lumos_nb.ledger": ("check_prediction", "read_ledger", "save_prediction"),
    "lumos_nb.report": ("step_report",),
    "lumos_nb.recorder": ("Recorder", "capture"),
    "lumos_nb.labels": ("ddp_hook",),
    "lumos_nb.fake_group": ("DryRun", "dry_run"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

_PUBLIC_MODULES = {name: f"lumos_nb.{name}" for name in ("charts", "datasets", "whatif", "widgets")}
_PUBLIC_MODULES["chakra"] = "lumos_nb.exchange.chakra"
_PUBLIC_MODULES["benchmark"] = "lumos_nb.exchange.benchmark"

__all__ = [*_MODULE_OF, "__version__"]
_FIRST = (
    *("load_run", "capture", "build_graph", "replay", "sweep", "breakdown", "compare", "step_report"),
    *("find_structure", "rewrite", "Transformer", "Parallelism", "Training", "Cluster", "estimate", "search"),
    *("load_calibration", "calibrate", "shard", "estimate_dlrm"),
)
"""The twenty that the Tab key shows, beside the modules: what one begins with. All others are in the reference."""


if not TYPE_CHECKING:  # else a misspelt name would pass every type checker

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            value: object = version("lumos-nb")
        elif name in _PUBLIC_MODULES:  # ln.datasets.path("gpt-ddp"), ln.charts.timeline(result)
            value = importlib.import_module(_PUBLIC_MODULES[name])
        elif name in _MODULE_OF:
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        else:
            raise AttributeError(f"module 'lumos_nb' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({"__all__", "__doc__", "__version__", *_FIRST, *_PUBLIC_MODULES})
