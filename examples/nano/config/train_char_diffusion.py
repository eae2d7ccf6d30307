"""Masked diffusion on characters: read by prepare.py and by train.py."""

dataset = "char_diffusion"
batch_size = 16
block_size = 64
seed = 1337

# the queue
backlog_batches = 32
batches_per_file = 4
delete = "checkpointed"

# the noise; other values than these are other batches, and need --purge
noise = "llada"  # or linear, cosine
ignore_index = -100
stages = [
    {"first_batch": 0, "low": 0.0, "high": 0.6},  # easy rows first
    {"first_batch": 100, "low": 0.0, "high": 1.0},
]

# the trainer
out_dir = "out-char-diffusion"
device = "cpu"
n_layer = 3
n_embd = 64
learning_rate = 4e-3
warmup_iters = 20
max_iters = 400
eval_interval = 100
eval_iters = 16
save_interval = 100
log_interval = 50
num_samples = 3
sample_steps = 64
