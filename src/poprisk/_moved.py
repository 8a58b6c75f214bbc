"""Names that moved in 0.2: the old ones work for one more version and say where the new ones are.

An old module (``poprisk.kernels``) is found by a finder at the end of ``sys.meta_path``; a name taken from it gives a
DeprecationWarning with the new place. What moved to the lab is there only where ``poprisk-lab`` is installed.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ROOT_NAMES = {
    "calibrated_alpha": "poprisk.optim",
    "hard_gate": "poprisk.optim",
    "loo_coefficient": "poprisk.optim",
    "one_step_loo_risk": "poprisk.optim",
    "population_projector": "poprisk.optim",
    "population_rate": "poprisk.optim",
    "rate_matrix": "poprisk.optim",
    "snr_gate": "poprisk.optim",
    "soft_gate": "poprisk.optim",
}
"""Once at the root of the package, now in a room."""

RENAMED = {
    "poprisk.report.run_report.run_report": "poprisk.report.write_report",
}
"""Names of old modules that have another name now."""

MODULES: dict[str, dict[str, str]] = {
    "poprisk.audit": {
        "poprisk.risk": "AuditTable audit",
        "poprisk.risk._audit.table": "DESCRIPTIONS",
    },
    "poprisk.autodiff": {
        "poprisk._core.autodiff.curvature": "SegmentCurvature",
        "poprisk._core.autodiff.flat": "FlatModel",
        "poprisk._core.autodiff.loss_derivatives": "loss_gradients loss_hessians",
        "poprisk._core.autodiff.losses": "ExampleLoss cross_entropy_loss logistic_loss resolve_loss squared_loss",
        "poprisk._core.autodiff.segment": "SegmentJacobian",
        "poprisk._core.autodiff.ways": "JacobianWay",
    },
    "poprisk.autodiff.flat": {
        "poprisk._core.autodiff.flat": "FlatModel",
    },
    "poprisk.ensembles": {
        "poprisk.cli._demonstration.networks": "MLPShape StackedMLP",
        "poprisk.cli._demonstration.training": "StackedTraining epoch_batches learning_rate_groups",
        "poprisk.risk": "retrain",
        "poprisk.risk._retraining.members": "Members",
        "poprisk.risk._retraining.retrain": "Retrained example_losses member_outputs",
    },
    "poprisk.estimate": {
        "poprisk._core.estimate": "Estimate",
    },
    "poprisk.experiments.comparison.arms": {
        "poprisk_lab.engine.arms": "ALL_ARMS ARMS Arm BETA1 Control USUAL require_arm",
    },
    "poprisk.experiments.comparison.reading": {
        "poprisk_lab.engine.reading": (
            "StoredMetric StoredRow StoredStudy best best_step curve failed final find_row metric_named oracle "
            "primary reached row rows steps_to trial_finals"
        ),
    },
    "poprisk.experiments.comparison.run": {
        "poprisk_lab.engine.run": "ComparisonResult Progress run_comparison",
    },
    "poprisk.experiments.comparison.search": {
        "poprisk_lab.engine.search": "COLUMNS Range trials",
    },
    "poprisk.experiments.comparison.study": {
        "poprisk_lab.engine.study": "DEFAULTS Look Setting Study choose describe run_study",
    },
    "poprisk.experiments.comparison.task": {
        "poprisk_lab.engine.task": "Cohort Metric=TaskMetric Portrayed StackedBatch StackedWeights Task=StackedTask",
    },
    "poprisk.experiments.demo": {
        "poprisk.cli._demonstration.study": (
            "DemoConfig DemoData DemoResult KIND MAX_NOISE OPTIMIZERS Progress Sweep default_lr demo_data run_demo"
        ),
    },
    "poprisk.experiments.demo_run": {
        "poprisk.cli._demonstration.recorded": (
            "NAME REPORT_TRAININGS check_place first_network first_problem record_demo report_budget"
        ),
    },
    "poprisk.experiments.gate_variants.plan": {
        "poprisk_lab.gates.plan": (
            "ADAMW Bench GateVariantsConfig KIND KNOWN SMOKE STRICT images_in row_label run studies"
        ),
    },
    "poprisk.experiments.run_analysis": {
        "poprisk.report": "Analysis analyze",
        "poprisk.report._analysis.analyze": "PARTS check_options",
        "poprisk.report._analysis.curves": "kernel_curve loss_curves memorization",
        "poprisk.report._analysis.neighbours": "neighbours",
    },
    "poprisk.experiments.run_gates": {
        "poprisk.report._analysis.gates": "GateCurve gate_curve has_gate",
    },
    "poprisk.experiments.run_window": {
        "poprisk.report": "CleanTargets",
        "poprisk.report._analysis.operators": (
            "DriftCurve MOST_OUTPUTS QUERIES WindowFacts window_facts window_seconds"
        ),
    },
    "poprisk.experiments.sobolev_slope": {
        "poprisk_lab.paper.sobolev_slope.study": (
            "SlopeConfig SlopePoint SobolevSlope circle_network circle_problem measure_point record sobolev_slope"
        ),
    },
    "poprisk.influence": {
        "poprisk.risk": (
            "Exclusion Reading Resampled RiskEstimate RiskMeter Unrolled cross_validation_risk exclusion "
            "exclusion_risk first_order_risk generalization_gap holdouts influence_matrix influence_on "
            "influence_operator k_fold leave_one_out population_risk self_influence subsets"
        ),
        "poprisk.risk._exclusion": "excluded_weights exclusion_displacement",
        "poprisk.risk._first_order": "TaylorRemainder taylor_remainder",
        "poprisk.risk._error": "inflated_error nested_error",
        "poprisk.risk._influence.displacement": (
            "ReplaceOneDisplacement example_scores gap_integrals replace_one_displacement"
        ),
        "poprisk.risk._influence.exclusion_sweep": "ExcludedOutputs ExclusionSweep",
        "poprisk.risk._influence.holdout_weights": "common_first_variation delete_direction holdout_weights",
        "poprisk.risk._influence.label_sensitivity": "label_sensitivities",
        "poprisk.risk._influence.live_rate": "population_rates",
        "poprisk.risk._influence.sensitivity": "Adjoint SpotCheck",
        "poprisk.risk._k_fold": "FoldEnsemble k_fold_curve",
        "poprisk.risk._resampling": "replace_one",
        "poprisk_lab.paper.mnist_influence.metrics": (
            "Brittleness LooCorrelation brittleness linear_datamodeling_score loo_correlation mislabel_auc share_found"
        ),
    },
    "poprisk.influence.baselines": {
        "poprisk_lab.paper.risk_honesty.baselines": (
            "evidence_criterion gradient_disparity kernel_gcv_risk takeuchi_risk"
        ),
    },
    "poprisk.influence.fold_error": {
        "poprisk.risk._error": "NestedSplit inflated_error nested_error",
    },
    "poprisk.influence.linear_step": {
        "poprisk.risk._influence.step_jacobian": "LinearStep=StepJacobian clip_direction",
    },
    "poprisk.influence.metrics": {
        "poprisk_lab.paper.mnist_influence.metrics": (
            "Brittleness LooCorrelation brittleness linear_datamodeling_score loo_correlation mislabel_auc share_found"
        ),
    },
    "poprisk.influence.resampling": {
        "poprisk.risk": "cross_validation_risk holdouts k_fold leave_one_out subsets",
        "poprisk.risk._k_fold": "k_fold_members k_fold_of_weights",
        "poprisk.risk._resampled": "RetrainOptions",
        "poprisk.risk._resampling": "replace_one",
    },
    "poprisk.jobs.operator_columns": {
        "poprisk.jobs._operator_columns": (
            "CODE Columns KIND OPERATORS OperatorColumns SYMMETRIC operator_group probe_columns"
        ),
    },
    "poprisk.kernels": {
        "poprisk.operators": (
            "KernelDrift Precision Timescales cross_kernel kernel_drift kernel_operator kernel_tiles "
            "method_costs rounded_kernel timescales train_kernel"
        ),
        "poprisk.operators._kernels.drift": "OperatorNorm operator_norm",
        "poprisk.operators._kernels.method": "Cost Method",
        "poprisk.operators._kernels.rounded_kernel": "RoundedKernel measured_error",
        "poprisk.operators._kernels.tangent": "output_trace",
        "poprisk.operators._kernels.tiles": "Tile on_host",
        "poprisk.operators._kernels.timescales": "curvature_root scaled_kernel scaled_kernel_operator",
    },
    "poprisk.linalg": {
        "poprisk._core.linalg.adjoint": "adjoint_mismatch",
        "poprisk._core.linalg.diagonal_estimators": "hutchinson_diagonal xdiag",
        "poprisk._core.linalg.factor": (
            "Spectrum spectrum_of_eigenpairs spectrum_of_factor spectrum_of_matrix tsqr_append"
        ),
        "poprisk._core.linalg.inverse_root": "InverseSquareRoot inverse_square_root",
        "poprisk._core.linalg.low_rank": "LowRank Preconditioner precondition",
        "poprisk._core.linalg.matrices": (
            "declare_symmetric diagonal from_dense from_functions horizontal_stack identity vertical_stack zeros"
        ),
        "poprisk._core.linalg.offdiagonal": "OffDiagonalProjector offdiagonal_projector",
        "poprisk._core.linalg.operator": "LinearOperator",
        "poprisk._core.linalg.projectors": (
            "Channels OrthogonalProjector epsilon_projectors null_projector range_projector"
        ),
        "poprisk._core.linalg.singular": "SingularTriplets top_singular_triplets",
        "poprisk._core.linalg.spectra": "Eigenpairs top_eigenpairs",
        "poprisk._core.linalg.trace": "hutchinson_trace hutchpp_trace xtrace",
    },
    "poprisk.operators": {
        "poprisk.operators._batch_law": "BatchLaw Sampling batch_laws remaining_examples",
        "poprisk.operators._coupling": (
            "PathErrorSplit anchored_coupling anchored_coupling_of_jacobians path_error path_error_split whitened_error"
        ),
        "poprisk.operators._cumulative": "LiftedStep flow_cumulative_error lifted_maps",
        "poprisk.operators._decomposition": "bregman_gap loss_gap",
        "poprisk.operators._dense": "Sources",
        "poprisk.operators._drift_diffusion": "CurvatureBound curvature_bound drift_bound",
        "poprisk.operators._gradient_descent": "RecordedSteps gradient_descent",
        "poprisk.operators._predictors": (
            "PredictorError TransferEquivalences predictor_error transfer_equivalences transfer_norm"
        ),
        "poprisk.operators._reach": "effective_preconditioners",
        "poprisk.operators._realized": "Discretization RealizedWindow",
        "poprisk.operators._trajectory": "Trajectory",
        "poprisk.operators._visibility": "lifted_gramian visibility_limit",
        "poprisk.theory": "window_bounds",
        "poprisk.theory.path_bounds": (
            "anchored_bound coarse_bound cumulative_bound nonlinear_bound path_error_order_bound "
            "predictor_bound remainder_bound sharp_bound trajectory_bound visibility_bound"
        ),
        "poprisk.theory.sobolev": (
            "SobolevBound fill_distance_slope sobolev_generalization_bound sobolev_operator_bound "
            "sobolev_trajectory_bound sobolev_transfer_bound"
        ),
        "poprisk.theory.torus": (
            "Torus fill_distance jacobian_sobolev_norm pathwise_sobolev_norm sobolev_norm voronoi_masses"
        ),
        "poprisk.theory.visibility_bounds": (
            "filtered_bound hard_reservoir_bound mobility_bound soft_reservoir_bound visibility_order_bound "
            "visibility_spectra visibility_spectrum_bound"
        ),
        "poprisk_lab.theory.diffusion_rates": (
            "DiffusionRate FluctuationVariance GrowthExponents ReplicateRates diffusion_rate "
            "fluctuation_variance growth_exponents replicate_rates"
        ),
        "poprisk_lab.theory.multi_epoch": "multi_epoch_residual",
        "poprisk_lab.theory.power_law": "power_law_exponent replicate_exponent",
        "poprisk_lab.theory.replace_two": "NoiseMean NoiseMeanSweep noise_mean_sweep replace_two weight_mask",
    },
    "poprisk.optim": {
        "poprisk.optim._defaults": "DEFAULTS Defaults PAPER",
    },
    "poprisk.optim.diagnostics": {
        "poprisk.optim._diagnostics": "GateDiagnostics Sums gate_sums meters over_all",
    },
    "poprisk.optim.parsing": {
        "poprisk.optim._parsing": "parse_options read_options",
    },
    "poprisk.optim.variant": {
        "poprisk_lab.gates.optimizer": "VariantAdamW",
    },
    "poprisk.population": {
        "poprisk._core.linalg.offdiagonal": "OffDiagonalProjector",
        "poprisk.optim": (
            "MicrobatchVariance PerExampleVariance RankVariance one_step_loo_risk population_projector "
            "population_rate rate_matrix"
        ),
        "poprisk.optim._estimators.rate": "kernel_blocks population_rate_from_kernel",
    },
    "poprisk.problems": {
        "poprisk.runs": "Problem digits_split replace_labels",
        "poprisk.runs._digits": "ReplacedLabels Split",
    },
    "poprisk.problems.char_lm": {
        "poprisk_lab.data.char_lm": (
            "CharText CharTransformer all_windows help_topics next_character_loss random_windows"
        ),
    },
    "poprisk.problems.cifar": {
        "poprisk_lab.data.cifar": (
            "ArraysOnly CifarImages HUMAN_LABELS HUMAN_SOURCE NUM_CLASSES SOURCE WRONG_SHARES cifar10 human_labels"
        ),
    },
    "poprisk.problems.idx": {
        "poprisk_lab.data.idx": "ImageSplit idx_split read_idx",
    },
    "poprisk.problems.llama": {
        "poprisk_lab.data.llama": "Lora StackedAdapters StackedLlama completion_log_probability rotations",
    },
    "poprisk.problems.llama_weights": {
        "poprisk_lab.data.llama_weights": ("Llama LlamaLayer LlamaShape TARGETS load_llama random_llama read_shape"),
    },
    "poprisk.problems.preferences": {
        "poprisk_lab.data.preferences": (
            "ChatTokenizer FORMAT_VERSION KIND Pair PairTokens Preferences encode_preferences is_held_out "
            "load_preferences load_tokenizer read_pairs save_preferences swapped_pairs synthetic_preferences"
        ),
    },
    "poprisk.problems.problem": {
        "poprisk.runs": "Problem",
        "poprisk.runs._problem": "Augmentation BatchLoss",
    },
    "poprisk.report.run_report": {
        "poprisk.report._drawing.page": "report_command report_page require_template training_call",
    },
    "poprisk.rules": {
        "poprisk.optim": "calibrated_alpha hard_gate loo_coefficient snr_gate soft_gate",
        "poprisk.optim.rules": "Hyper PopulationState initial_state linearize population_step",
    },
    "poprisk.rules.peers": {
        "poprisk_lab.engine.peers": "Knobs PEERS Peer States adabelief adamw cautious cubed grokfast msvag",
    },
    "poprisk.rules.variants": {
        "poprisk_lab.gates.variants": (
            "BLOCK CALM Direction LONG NEED_HALVES PASSES_OF_WORTH SAFE SLOW STEPS_OF_EVIDENCE SURE VARIANTS "
            "agreement_after_first_pass agreement_or_calm agreement_over_blocks break_even closing_with_replay "
            "fading_agreement gated_momentum halves_agreement halves_agreement_blocks halves_variance "
            "held_apart hysteresis kept_norm lagged_agreement lagged_agreement_blocks lagged_agreement_elements "
            "latched_agreement open_first_pass pass_agreement passes pooled_blocks pooled_whole replayed_alpha "
            "replayed_alpha_falling replayed_strength root_gate shrunk_blocks sign_agreement slow_evidence "
            "successive_differences tolerant_agreement"
        ),
    },
    "poprisk.runs": {
        "poprisk.runs": "Step=AffineStep",
        "poprisk.runs._flat_rule": "FlatRule flat_rule",
    },
    "poprisk.runs.dataset": {
        "poprisk.runs._dataset": "IndexedDataset",
    },
    "poprisk.runs.progress": {
        "poprisk._core.progress": "Report time_left training_progress write_line",
    },
    "poprisk.runs.recorded_step": {
        "poprisk.runs._linearize": "unexplained",
        "poprisk.runs._step": "Indices Observer Parts RecordedStep=StepContext micro_batches",
    },
    "poprisk.runs.run": {
        "poprisk.runs": "Run",
    },
    "poprisk.runs.step": {
        "poprisk.runs": "PerWeight Step=AffineStep",
    },
    "poprisk.scaling": {
        "poprisk_lab.costs.cost": "OperationCost",
        "poprisk_lab.costs.kernels": (
            "factor_tile jacobian_tile kept_as_factors kernel_product lanczos product_blocks product_tile "
            "rounded_product rounded_rows"
        ),
        "poprisk_lab.costs.machine": (
            "CheckedOperation Exponent Fit Machine Point calibrate checked_operations fitted_exponent "
            "geometric_mean machine_of"
        ),
        "poprisk_lab.costs.network": "LayerSize Network",
        "poprisk_lab.costs.operations": "OPERATION_MODELS QUEUED cost_of",
        "poprisk_lab.costs.training": "StateBytes optimizer_step rank_variance sharded_messages training_step",
        "poprisk_lab.costs.trajectories": "adjoint recording retraining window_gramian window_transfer",
    },
    "poprisk.spectral": {
        "poprisk.theory": (
            "ExampleGroups FrozenProblem SignalDirections example_groups frozen_problem linear_operators "
            "signal_directions"
        ),
        "poprisk.theory.bias_variance": "Risk interpolation_variance noise_covariance realized_risk risk",
        "poprisk.theory.directions": "signal_directions_of",
        "poprisk.theory.effective_rank": "effective_rank",
        "poprisk.theory.groups": "DirectionExample direction_energies top_examples",
        "poprisk.theory.filters": (
            "checked_filter decayed_flow_filter gradient_flow_filter interpolation_filter predictive_basis "
            "rank_filter ridge_filter threshold_filter"
        ),
        "poprisk.theory.frozen": "apply_filter frozen_problem_from frozen_problem_of_features",
        "poprisk.theory.graph": "graph_metric laplacian_metric neighbour_graph normalized_laplacian",
        "poprisk.theory.linear_model": "LinearOperators decayed_weights least_norm_weights ridge_weights",
        "poprisk.theory.lost_motion": (
            "LostMotionPath admissible_bound attaining_transfer lost_motion_path minimax_lost_motion tail_bound "
            "worst_lost_motion"
        ),
        "poprisk.theory.matrix_functions": "operator_function",
        "poprisk.theory.metrics": "Metric euclidean_metric lifted_over_outputs metric_of",
        "poprisk.theory.predictive_rank": "PredictiveRankPath predictive_rank_path",
        "poprisk.theory.random_features": "RandomFeatureTask random_feature_task",
        "poprisk.theory.ridge": "OptimalRidge RidgePath optimal_ridge ridge_path",
        "poprisk.theory.self_influence": (
            "self_influence_metric self_influence_responses start_covectors weighted_transfer "
            "weighted_transfer_spectrum"
        ),
        "poprisk.theory.soft_filter": "TraceBudgetFilter trace_budget_filter",
        "poprisk.theory.transfer_mass": (
            "frozen_visibility grouped_mass mobility_groups transfer_mass transfer_operator transfer_spectra"
        ),
        "poprisk_lab.theory.double_descent": (
            "DoubleDescentStudy PeakTrial SimulatedRisks WidthSweep double_descent_study double_descent_trial "
            "simulate_predictive_ranks width_sweep"
        ),
    },
    "poprisk.store": {
        "poprisk._core.store.envelope": "FORMAT_VERSION environment load_result save_result",
        "poprisk._core.store.files": "writable_directory write_bytes write_figure write_json write_text",
        "poprisk._core.store.import_paths": "Importable importable resolve",
        "poprisk._core.store.script": "where",
    },
    "poprisk.store.tensors": {
        "poprisk._core.store.tensors": "TensorFile check_size fingerprint read_tensors write_tensors",
    },
}
"""Old module → new module → the names that went there, ``old=new`` where they were renamed."""

_PACKAGES = {name.rpartition(".")[0] for name in MODULES}


def root_name(name: str) -> Any:
    """A name that was at the root, with a warning."""
    _warn(f"poprisk.{name}", f"{ROOT_NAMES[name]}.{name}", stacklevel=4)
    return getattr(import_module(ROOT_NAMES[name]), name)


def moved_attribute(module: str, name: str) -> Any:
    """A name of an old module, from where it is now, with a warning.

    Raises:
        AttributeError: the old module had no such name.
        ImportError: it is in the lab, which is not installed.
    """
    if (new := RENAMED.get(f"{module}.{name}")) is not None:
        _warn(f"{module}.{name}", new, stacklevel=4)
        place, _, name = new.rpartition(".")
        return getattr(_imported(place, f"{module}.{name}"), name)
    for place, names in MODULES.get(module, {}).items():
        new = renamed(names).get(name)
        if new is not None:
            _warn(f"{module}.{name}", f"{place}.{new}", stacklevel=4)
            return getattr(_imported(place, f"{module}.{name}"), new)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def renamed(names: str) -> dict[str, str]:
    """Old names and new ones, as ``MODULES`` lists them.

    >>> renamed("PerWeight Step=AffineStep")
    {'PerWeight': 'PerWeight', 'Step': 'AffineStep'}
    """
    pairs = (entry.partition("=") for entry in names.split())
    return {old: new or old for old, _, new in pairs}


def install() -> None:
    """Let old modules be found; once per process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def _imported(place: str, old: str) -> ModuleType:
    try:
        return import_module(place)
    except ModuleNotFoundError as error:
        if not place.startswith("poprisk_lab"):
            raise
        raise ImportError(
            f"{old} moved to the lab, {place}, which is not installed: pip install ./lab in a checkout of poprisk"
        ) from error


def _warn(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes in version 0.3", DeprecationWarning, stacklevel=stacklevel)


class _Moved(ModuleType):
    """An old module: empty but for the memory of where its names went."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = moved_attribute(self.__name__, name)
        setattr(self, name, value)  # an import statement asks twice; one warning is enough
        return value

    def __dir__(self) -> list[str]:
        return sorted(name for names in MODULES.get(self.__name__, {}).values() for name in renamed(names))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """``poprisk.audit`` is a function now; importing the old module of that name must not hide it."""
        if self.__name__ != "poprisk.audit":
            raise TypeError(f"module {self.__name__!r} is not callable")
        return import_module("poprisk.risk").audit(*arguments, **options)


class _Finder(MetaPathFinder, Loader):
    """Finds what was moved and only that; real modules come first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES or (fullname in _PACKAGES and fullname != "poprisk"):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Moved(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""
