"""Prints what TensorBoard's own package reads of the event files in a folder: one JSON object.

  read_events.py FOLDER
"""
import json
import sys

from tensorboard.backend.event_processing import event_accumulator

everything = {event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}
events = event_accumulator.EventAccumulator(sys.argv[1], size_guidance=everything).Reload()
curves, texts = {}, {}
for tag in events.Tags()["tensors"]:
    plugin = events.SummaryMetadata(tag).plugin_data.plugin_name
    for event in events.Tensors(tag):
        if plugin == "text":
            texts.setdefault(tag, []).append([event.step, event.tensor_proto.string_val[0].decode()])
        else:
            curves.setdefault(tag, []).append([event.step, event.tensor_proto.float_val[0]])
for tag in events.Tags()["scalars"]:
    curves[tag] = [[event.step, event.value] for event in events.Scalars(tag)]
print(json.dumps({"version": events.file_version, "curves": curves, "texts": texts}))
