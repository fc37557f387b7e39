"""A verifier process that misbehaves on request; run as a script. The answer says what to do."""

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
    print(json.dumps({"id": serial, "verdict": "correct"}), flush=True)
    if request["answer"] == "die afterwards":
        os._exit(3)
