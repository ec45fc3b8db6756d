"""Each module has a test at its place, or is listed with what shows it."""

import pathlib

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "keras_towers"
# What users see of these modules is tested elsewhere.
SHOWN_BY = {
    "docs": "settings",
    "checkers": "_types",
    "cli/test_doctor.py": "installed",
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
        engines/horovod/hvd/horovod_reducer
        engines/horovod/hvd/operations
    """,
    "fit/calls/test_tower_call.py": """
        fit/calls/keras_loop fit/calls/lone_call fit/calls/meeting
        fit/calls/model_building fit/calls/tower_runner
        fit/context/patches fit/context/thread_state
    """,
    "fit/step/test_auto_micro_batches.py": "fit/step/memory_retries",
    "fit/step/test_remat_scope.py": "fit/context/remat_scopes",
    "fit/data/test_inputs.py": """
        fit/data/batches fit/data/data_use fit/data/epoch_iterator
        fit/data/shuffle_order
        fit/data/tower_datasets fit/step/step_inputs
    """,
    "fit/step/test_global_step.py": """
        fit/components fit/step/step_layout fit/step/tower_functions
    """,
    "fit/test_options.py": "fit/given_values",
    "fit/ranks/test_step_order.py": """
        fit/ranks/compared_step fit/ranks/step_agreement
    """,
    "fit/update/test_optimizers.py": "fit/update/weight_update",
    "fit/weights/test_adoption.py": "fit/weights/model_state",
    "fit/weights/test_tower_variables.py": "fit/weights/copies",
    "bench/test_runner.py": "bench/rows",
    "launching/test_horovod_jobs.py": "launching/rank_job",
    "launching/test_run.py": "cli/launch_plan cli/run cli/run_options",
    "launching/test_script.py": "rendezvous/separate_training",
    "launching/test_supervision.py": "launching/outcome",
    "parameter_servers": """
        parameter_servers/remote_runtime parameter_servers/server_process
        parameter_servers/server_tasks parameter_servers/server_variables
        parameter_servers/training_session parameter_servers/async_updates
        parameter_servers/averaged_updates
        parameter_servers/worker_fit parameter_servers/worker_runner
    """,
    "partition/rules/test_reductions.py": "partition/paired_variances",
    "partition/rules/test_rules.py": """
        partition/registry partition/rules/elementwise
    """,
    "partition/test_conversions.py": "partition/list_conversions",
    "partition/test_layouts.py": "partition/values",
    "partition/test_ranks.py": "partition/undivided",
    "partition/test_partitioned.py": """
        partition/emission partition/nodes partition/program
    """,
    "processes/test_elastic.py": """
        engines/horovod/hvd/elastic_states
    """,
    "processes/test_ranks.py": """
        fit/data/shared_files fit/update/local_sgd
        reduction/hook_names reduction/gradients transport/engine_transport
    """,
    "reduction/test_collectives.py": "reduction/collective_ops",
    "rendezvous/test_meet.py": "rendezvous/rank_helper",
    "rendezvous/test_store.py": """
        rendezvous/local_store rendezvous/signatures rendezvous/store_link
        rendezvous/store_server
    """,
    "strategies/test_async_towers.py": """
        replicas/averages replicas/hogwild replicas/named_resources
        replicas/replica_calls replicas/replica_counts
        replicas/replica_group replicas/staleness replicas/tower_threads
        strategies/replica_strategies
    """,
    "strategies/test_base.py": """
        _strategy strategies/description strategies/tower
        strategies/tower_extended
    """,
    "strategies/test_model_parallel.py": """
        partition/mesh partition/column_exchanges strategies/device_mesh
        strategies/layout_map
    """,
    "exactness/test_contract.py": """
        conformance/cases conformance/case_models conformance/outcomes
    """,
    "test_backup_folder.py": "backup_choice",
    "test_saved_training.py": "saved_state",
    "test_extending.py": """
        _incomplete conformance/strategy_check rendezvous/joined_job
        strategies/composed
    """,
    "test_planning.py": "fit/step/dry_run",
    "test_what_is_printed.py": "_notices",
    "timeline/test_callback.py": "timeline/trace_file",
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
