"""Prints what the package of Weights & Biases reads of an offline run: one JSON object.

  read_wandb.py FILE

Its status is 77 where there is no such package.
"""
import json
import sys

try:
    import wandb

    wandb._set_internal_process(disable=True)
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal import datastore
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(77)


def items(record):
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record}


store = datastore.DataStore()
store.open_for_scan(sys.argv[1])
read = {"config": {}, "history": [], "summary": {}, "metrics": {}, "exits": [], "numbers": [], "runs": []}
while (data := store.scan_data()) is not None:
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    read["numbers"].append(record.num)
    kind = record.WhichOneof("record_type")
    if kind == "header":
        read["producer"] = record.header.version_info.producer
    elif kind == "run":
        run = record.run
        read["runs"].append({"id": run.run_id, "project": run.project, "entity": run.entity, "group": run.run_group,
                             "host": run.host, "start": run.start_time.ToNanoseconds()})
    elif kind == "config":
        read["config"].update(items(record.config.update))
    elif kind == "metric":
        read["metrics"][record.metric.name or record.metric.glob_name] = record.metric.step_metric
    elif kind == "history":
        row = items(record.history.item)
        assert row["_step"] == record.history.step.num
        read["history"].append(row)
    elif kind == "summary":
        read["summary"].update(items(record.summary.update))
    elif kind == "exit":
        read["exits"].append(record.exit.exit_code)
    else:
        raise SystemExit(f"a record of kind {kind}")
print(json.dumps(read))
