"""The Python interpreter of a sandbox, as it lives in the guest: a zygote, its workers, and their wire.

Runs inside the guest at /usr/lib/llm4agents/runner/ on the guest's own Python (3.11 or later, standard
library only; numpy, pandas, matplotlib and IPython are used when they are there). Not part of the host's
package: nothing on the host imports it, and it imports nothing of `llm4agents`.
"""
