"""Each module has a test at its place, or is listed with what shows it."""

import pathlib

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "keras_towers"
# What users see of these modules is tested elsewhere.
SHOWN_BY = {
    "docs": "foundation/settings",
    "checkers": "foundation/object_types",
    "cli/test_doctor.py": "cli/installed",
    "cli/test_plan.py": "cli/plan_hosts",
    "engines/byteps": """
        engines/byteps/bps/callbacks engines/byteps/byteps_recipe
        engines/byteps/byteps_servers engines/byteps/byteps_strategy
        engines/byteps/byteps_process engines/byteps/byteps_transport
    """,
    "engines/horovod": """
        engines/dropin/horovod_callbacks
        engines/dropin/distributed_models engines/dropin/gradient_reducer
        engines/horovod/horovod_recipe engines/horovod/horovod_strategy
        engines/horovod/horovod_transport
        engines/horovod/hvd/distributed_optimizers
        engines/horovod/hvd/operations
    """,
    "fit/calls/test_tower_call.py": """
        fit/calls/keras_loop fit/calls/lone_call fit/calls/meeting
        fit/calls/model_building fit/calls/tower_runner
        fit/context/patches fit/context/thread_state
    """,
    "fit/step/test_auto_micro_batches.py": "fit/step/running/memory_retries",
    "fit/step/test_remat_scope.py": "fit/context/remat_scopes",
    "fit/data/test_inputs.py": """
        fit/data/batches fit/data/data_use fit/data/epoch_iterator
        fit/data/shuffle_order
        fit/data/tower_datasets fit/step/graph/step_inputs
    """,
    "fit/step/test_global_step.py": """
        fit/components fit/step/eager_step fit/step/graph/pushed_gradients
        fit/step/graph/placed_tensors
        fit/step/graph/step_comparison fit/step/graph/step_layout
        fit/step/graph/tower_functions
    """,
    "fit/step/plan/test_device_memory.py": """
        fit/step/plan/memory_limit fit/step/plan/memory_messages
    """,
    "fit/test_options.py": "fit/given_values",
    "fit/ranks/test_step_order.py": """
        fit/ranks/compared_step fit/ranks/step_agreement
    """,
    "fit/weights/test_adoption.py": "fit/weights/model_state",
    "fit/weights/test_tower_variables.py": "fit/weights/copies",
    "inspection/bench/test_runner.py": "inspection/bench/rows",
    "jobs/launching/test_horovod_jobs.py": "jobs/launching/rank_job",
    "jobs/launching/test_run.py": "cli/launch_plan cli/run cli/run_options",
    "jobs/launching/test_script.py": "jobs/rendezvous/separate_training",
    "jobs/launching/test_supervision.py": "jobs/launching/outcome",
    "parameter_servers": """
        parameter_servers/remote_runtime parameter_servers/server_process
        parameter_servers/server_tasks parameter_servers/server_variables
        parameter_servers/training_session parameter_servers/async_updates
        parameter_servers/averaged_updates
        parameter_servers/worker_fit parameter_servers/worker_runner
    """,
    "partition/layout/rules/test_rules.py": """
        partition/ir/registry partition/layout/rules/elementwise
    """,
    "partition/layout/test_conversions.py": "partition/layout/list_conversions",
    "partition/ir/test_layouts.py": "partition/ir/values",
    "partition/test_ranks.py": "partition/layout/undivided",
    "fit/step/graph/test_program_text.py": "fit/step/graph/fixed_tables",
    "partition/timeline/sliced_weights/test_weight_slices.py": (
        "partition/timeline/sliced_weights/slice_writer"
    ),
    "partition/test_partitioned.py": """
        partition/emission partition/layout/nodes partition/ir/program
    """,
    "processes/test_elastic.py": """
        engines/horovod/hvd/elastic_states
    """,
    "processes/test_ranks.py": """
        fit/data/shared_files fit/update/local_sgd
        reduction/hook_names reduction/gradients transport/engine_transport
    """,
    "reduction/test_collectives.py": "reduction/collective_ops",
    "jobs/rendezvous/test_meet.py": "jobs/rendezvous/rank_helper",
    "jobs/rendezvous/test_store.py": """
        jobs/rendezvous/local_store jobs/rendezvous/signatures
        jobs/rendezvous/store_server
    """,
    "strategies/test_async_towers.py": """
        replicas/averages replicas/hogwild replicas/named_resources
        replicas/replica_calls replicas/replica_counts
        replicas/replica_group replicas/staleness replicas/tower_threads
        strategies/replica_strategies
    """,
    "strategies/test_base.py": """
        foundation/tf_strategy strategies/description strategies/tower
        strategies/tower_extended
    """,
    "strategies/test_model_parallel.py": """
        partition/mesh partition/layout/column_exchanges strategies/device_mesh
        strategies/layout_map
    """,
    "exactness/test_contract.py": """
        inspection/conformance/cases inspection/conformance/case_models
        inspection/conformance/outcomes
    """,
    "backups/test_backup_folder.py": "backups/backup_choice",
    "backups/test_saved_training.py": "backups/saved_state",
    "test_extending.py": """
        foundation/incomplete_classes strategies/composed
        inspection/conformance/strategy_check jobs/rendezvous/joined_job
    """,
    "inspection/test_planning.py": "fit/step/plan/dry_run",
    "test_what_is_printed.py": "foundation/notices",
    "inspection/recording/test_callback.py": "inspection/recording/trace_file",
}


def test_each_module_has_a_test_or_says_what_shows_it():
    modules = {
        path.relative_to(PACKAGE).with_suffix("").as_posix()
        for path in PACKAGE.rglob("*.py")
        if not path.name.startswith("__")
    }
    without = {module for module in modules if not _test_of(module).exists()}
    listed = [name for names in SHOWN_BY.values() for name in names.split()]
    assert sorted(listed) == sorted(without)
    assert all((ROOT / "tests" / place).exists() for place in SHOWN_BY)


def _test_of(module):
    folder, name = (PACKAGE / module).parent, pathlib.Path(module).name
    tests = ROOT / "tests" / folder.relative_to(PACKAGE)
    return tests / f"test_{name.lstrip('_')}.py"
