"""A tool service over NATS that counts words. NATS_URL is the URL of NATS."""
import os

from toolcrib_sdk.utp import Service

service = Service(os.environ.get("NATS_URL", "nats://127.0.0.1:4222"))


@service.tool("text.count", target="count")
async def count(args, call):
    return {"words": len(args["text"].split())}


service.run()
