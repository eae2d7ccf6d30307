"""What `secrets` and its kernels share: shapes, names and words of secrets, kinds, vectors."""

from typing import Final, NamedTuple

from penstock.arrays import Bytes, Floats, Int64s

CLASSES: Final = {
    "d": "0-9",
    "h": "0-9a-f",
    "H": "0-9a-fA-F",
    "l": "0-9a-z",
    "u": "0-9A-Z",
    "a": "0-9A-Za-z",
    "w": "0-9A-Za-z_-",
    "b": "0-9A-Za-z+/",
    "B": "0-9A-Za-z+/=",
}
"""Letters that stand for characters in a shape."""

# A shape is literal text and runs of a class, class:count, class:least-most or class:least-. It
# takes all that it can, and no more of its last class or of a word may follow.
TOKENS: Final = (
    ("aws_key", "AKIA u:16", "ASIA u:16", "ABIA u:16", "ACCA u:16"),
    ("github_token", "ghp_ a:36-", "gho_ a:36-", "ghu_ a:36-", "ghs_ a:36-", "ghr_ a:36-",
     "github_pat_ [0-9A-Za-z_]:50-"),
    ("gitlab_token", "glpat- w:27-300 . l:2 . l:9", "glrt- w:27-300 . l:2 . l:9",
     "glpat- w:20-", "gldt- w:20-", "glrt- w:20-", "glptt- h:40", "glft- w:20-",
     "glsoat- w:20-", "glimt- w:25", "gloas- w:64", "glcbt- w:20-", "glagent- w:50-",
     "GR1348941 w:20"),
    ("slack_token", "xox [abeoprs]:1 - d:1 [0-9A-Za-z-]:9-", "xoxe.xox [bp]:1 - [0-9A-Z-]:100-",
     "xapp- d:1 - u:8-16 - d:8-16 - l:40-"),
    ("google_key", "AIza w:35", "GOCSPX- w:28", "ya29. w:40-"),
    ("stripe_key", "sk_live_ a:16-", "rk_live_ a:16-", "sk_test_ a:16-", "rk_test_ a:16-",
     "whsec_ a:32"),
    ("anthropic_key", "sk-ant- w:24-"),
    ("openai_key", "sk- w:20-"),
    ("huggingface_token", "hf_ a:34-", "api_org_ a:34"),
    ("npm_token", "npm_ a:36-"),
    ("pypi_token", "pypi-AgEIcHlwaS5vcmc w:50-", "pypi-AgENdGVzdC5weXBpLm9yZw w:50-"),
    ("rubygems_key", "rubygems_ h:48"),
    ("sendgrid_key", "SG. w:16-24 . w:40-46"),
    ("twilio_key", "SK h:32"),
    ("discord_token", "[MNO]:1 [DTjz]:1 [AEIMQUYcgk]:1 w:20-25 . w:6-7 . w:27-40", "mfa. w:84"),
    ("telegram_token", "d:8-10 :AA w:33"),
    ("digitalocean_token", "dop_v1_ h:64", "doo_v1_ h:64", "dor_v1_ h:64"),
    ("mailgun_key", "key- h:32"),
    ("mailchimp_key", "h:32 -us d:1-2"),
    ("shopify_token", "shpat_ H:32", "shpca_ H:32", "shppa_ H:32", "shpss_ H:32"),
    ("square_token", "sq0atp- w:22", "sq0csp- w:43", "EAAA w:60"),
    ("facebook_token", "EAA a:97-400"),
    ("databricks_token", "dapi h:32 -2", "dapi h:32"),
    ("heroku_key", "HRKU- w:60"),
    ("linear_key", "lin_api_ a:40", "lin_oauth_ h:64"),
    ("notion_token", "ntn_ d:11 a:35", "secret_ a:43"),
    ("postman_key", "PMAK- h:24 - h:34"),
    ("grafana_token", "glsa_ a:32 _ H:8", "glc_ B:32-400"),
    ("doppler_token", "dp.pt. a:40-44", "dp.st. [0-9A-Za-z._-]:40-80", "dp.ct. a:40-44",
     "dp.sa. a:40-44", "dp.scim. a:40-44", "dp.audit. a:40-44"),
    ("vault_token", "hvs. w:24-", "hvb. w:24-", "hvr. w:24-"),
    ("terraform_token", "a:14 .atlasv1. w:60-70"),
    ("atlassian_token", "ATATT3 [0-9A-Za-z_=-]:150-200", "ATCTT3 [0-9A-Za-z_=-]:150-200",
     "ATBB a:32"),
    ("cloudflare_key", "v1.0- h:24 - h:146"),
    ("azure_secret", "[0-9A-Za-z_~.]:3 d:1 Q~ [0-9A-Za-z_~.-]:31-34"),
    ("newrelic_key", "NRAK- u:27", "NRII- w:32", "NRJS- h:19", "NRRA- h:42"),
    ("sentry_token", "sntryu_ h:64", "sntrys_eyJ [0-9A-Za-z+/=_]:80-"),
    ("brevo_key", "xkeysib- h:64 - a:16", "xsmtpsib- h:64 - a:16"),
    ("pulumi_token", "pul- h:40"),
    ("planetscale_token", "pscale_tkn_ [0-9A-Za-z_=.-]:32-64",
     "pscale_oauth_ [0-9A-Za-z_=.-]:32-64", "pscale_pw_ [0-9A-Za-z_=.-]:32-64"),
    ("dynatrace_token", "dt0c01. u:24 . u:64"),
    ("artifactory_key", "AKCp a:69", "cmVmd a:59"),
    ("onepassword_key", "ops_eyJ B:250-2000"),
    ("age_key", "AGE-SECRET-KEY-1 [02-9AC-HJ-NP-Z]:58"),
    ("alibaba_key", "LTAI a:20"),
    ("flyio_token", "fo1_ w:43", "fm2_ B:100-2000"),
    ("perplexity_key", "pplx- a:48"),
    ("groq_key", "gsk_ a:52"),
    ("replicate_token", "r8_ a:37"),
    ("xai_key", "xai- a:80"),
    ("easypost_key", "EZAK a:54", "EZTK a:54"),
    ("shippo_token", "shippo_live_ H:40", "shippo_test_ H:40"),
    ("prefect_key", "pnu_ a:36", "pnb_ a:36"),
    ("readme_key", "rdme_ l:70"),
    ("jwt", "eyJ w:7- . w:10- . w:10-"),
)  # fmt: skip
"""Each kind with the shapes of its keys; the first that fits is taken."""

ADDRESSES: Final = (
    ("slack_webhook", "hooks.slack.com/services/ u:9-14 / u:9-14 / a:20-28",
     "hooks.slack.com/workflows/ u:9-14 / u:9-14 / d:14-20 / a:20-28",
     "hooks.slack.com/triggers/ u:9-14 / d:10-16 / h:32"),
    ("discord_webhook", "discord.com/api/webhooks/ d:17-20 / w:60-72",
     "discordapp.com/api/webhooks/ d:17-20 / w:60-72",
     "canary.discord.com/api/webhooks/ d:17-20 / w:60-72",
     "ptb.discord.com/api/webhooks/ d:17-20 / w:60-72"),
    ("teams_webhook", "w:1-63 .webhook.office.com/webhookb2/ [0-9a-f@-]:73 /IncomingWebhook/ h:32 /"
     " [0-9a-f-]:36"),
)  # fmt: skip
"""Addresses that are secrets themselves; from behind ://."""

_UUID = "h:8 - h:4 - h:4 - h:4 - h:12"
ASSIGNED: Final = (
    ("aws_secret", "secretaccesskey awssecret secretkey awsaccesskey s3secret", "b:40"),
    ("azure_key", "accountkey sharedaccesskey storagekey accesskey cosmoskey primarykey azure",
     "b:86 ==", "b:43 ="),
    ("heroku_key", "heroku", _UUID),
    ("datadog_key", "datadog ddapi ddapp", "h:32", "h:40"),
    ("cloudflare_key", "cloudflare cfapi", "h:37", "w:40"),
    ("twilio_key", "twilio", "h:32"),
    ("mailgun_key", "mailgun", "h:32 - h:8 - h:8"),
)  # fmt: skip
"""Kinds whose keys have a shape that others have too, with what the name before them holds."""

PASSWORD_NAMES: Final = (
    "password", "passwd", "passphrase", "pwd", "secret", "token", "apikey", "accesskey",
    "privatekey", "authkey", "accountkey", "masterkey", "encryptionkey", "signingkey", "sharedkey",
    "appkey", "licensekey", "credential",
)  # fmt: skip
"""What the name of a secret holds, without case and _ - . and spaces."""

LAST_NAMES: Final = (
    "dbpass", "userpass", "rootpass", "adminpass", "mysqlpass", "postgrespass", "redispass",
    "smtppass", "mailpass", "ftppass", "wifipass",
)  # fmt: skip
"""What the name of a secret ends in; bypass and renderpass are none."""

SETTINGS: Final = ("password", "passwd", "pwd", "pass")
"""What the name of a password in small letters ends in: db.password=…, Password=…;"""

LONG: Final = ("token",)
"""What a name holds whose value may have more than 256 bytes: AWS session tokens."""

NOT_NAMES: Final = (
    "hash", "digest", "checksum", "sha1", "sha256", "sha512", "md5", "fingerprint", "public",
    "example", "dummy", "fake", "sample", "mock", "csrf", "xsrf", "tokeniz", "placeholder",
    "nexttoken", "continuationtoken", "pagetoken", "requesttoken", "clienttoken", "changetoken",
    "actiontoken", "synctoken", "inputtoken", "outputtoken", "verificationtoken",
)  # fmt: skip
"""What the name of something else holds."""

NOT_LAST: Final = (
    "id", "ids", "name", "type", "kind", "url", "uri", "endpoint", "path", "file", "dir", "length",
    "len", "size", "count", "index", "idx", "expiry", "expires", "expiresin", "expiresat", "ttl",
    "time", "date", "createdat", "updatedat", "regex", "pattern", "format", "class", "field",
    "label", "header", "version", "algorithm", "prefix", "suffix", "hint", "ref", "issuer", "scope",
    "limit", "policy", "message", "error", "title", "text", "description", "param", "arn", "status",
    "used", "spec", "config", "provider", "manager", "store", "service", "client", "handler",
)  # fmt: skip
"""What the name of something else ends in."""

MADE_UP: Final = (
    "example", "xxxx", "your", "placeholder", "dummy", "sample", "changeme", "change_me",
    "redacted", "insert", "replace", "fake", "foobar", "notreal", "test", "mock", "demo", "secret",
    "password", "passwd", "token", "apikey", "12345678", "abcdefgh", "deadbeef", "...",
    "ikpvag4grg9l",  # "John Doe" in the token of jwt.io
    "4ec39hqlyjwdarjtt1zdp7dc", "bqokikjovbii2hlwgh4olfq2",  # Stripe's documents
    "eby8vdm02xnocqflquwjpllmetlcdxj1ouzft50usrz6ifsufq2uverc",  # Azure's emulator
    "c2y6yddjf5",  # its database's
)  # fmt: skip
"""What a secret does not hold: it stands for one. In small letters."""

MIN_BITS: Final = 3.0
MAX_VALUE: Final = 1200
"""Bytes of the longest value."""

_BY_NAME: Final = ("aws_secret", "azure_key", "datadog_key")
SECRETS: Final = (
    *(kind for kind, *_ in TOKENS), *(kind for kind, *_ in ADDRESSES), *_BY_NAME, "private_key",
    "url_password", "password",
)  # fmt: skip
PII: Final = ("email", "ipv4", "ipv6", "phone", "card", "iban")
KINDS: Final = (*SECRETS, *PII)
"""What can be found; `Found.kind` has their numbers."""

NAME_BYTES: Final = 48
"""So much of a name is read; kernels compare eight bytes at a time, and up to 16 behind it."""


class Spans(NamedTuple):
    """What was found: from, to, and the number of its kind."""

    start: Int64s
    end: Int64s
    kind: Bytes


class Scratch(NamedTuple):
    """What the kernel needs to judge one value."""

    logs: Floats
    """By n: n * log2(n), up to MAX_VALUE."""
    counts: Int64s
    """Of each byte."""
    name: Bytes
    """The name before it, in small letters."""
