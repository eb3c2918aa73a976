"""vLLM as the inference engine of a replica. Nothing else imports vLLM.

`engine` runs in the replica's process; `worker` in the processes that vLLM starts below it.
"""
