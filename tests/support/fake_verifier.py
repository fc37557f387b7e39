"""A verifier process that starts at once, compares text, and misbehaves when the answer says so. Run as a script."""

import json
import os
import sys
import time

print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["answer"] == "hang":
        time.sleep(600)
    if request["answer"] == "die":
        os._exit(3)
    serial = -1 if request["answer"] == "confuse" else request["id"]
    verdict = "wrong" if request["answer"] != request["reference"] else "correct"
    print(json.dumps({"id": serial, "verdict": verdict}), flush=True)
    if request["answer"] == "die afterwards":
        os._exit(3)
