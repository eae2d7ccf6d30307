"""Texts with secrets at known offsets, and texts with what only looks like them.

    python tests/prepare/leaks.py 400            recall and precision, of 400 texts for each kind
    python tests/prepare/leaks.py 60 --faults    and what was missed or found wrongly

The generator knows each secret to the byte and nothing of how `penstock.prepare.secrets` finds it.
Lengths and alphabets are those that the makers and gitleaks' public rules name.
"""

import base64
import random
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.kernels import byte_buffer
from penstock.prepare import secrets_layout
from penstock.prepare.secrets import KINDS, SECRETS, find
from penstock.records import Documents

DIGITS, LOWER, UPPER = string.digits, string.ascii_lowercase, string.ascii_uppercase
HEX = DIGITS + "abcdef"
ALNUM = DIGITS + LOWER + UPPER
URL64 = ALNUM + "-_"
BASE64 = ALNUM + "+/"
EACH = 60  # texts with a secret, and texts with none, for each kind


class Chance(random.Random):
    def of(self, alphabet: str, size: int, most: int = 0) -> str:
        return "".join(self.choices(alphabet, k=self.randint(size, most or size)))

    def uuid(self) -> str:
        return "-".join(self.of(HEX, size) for size in (8, 4, 4, 4, 12))


def discord(c: Chance) -> str:
    user = base64.b64encode(str(c.randint(10**17, 10**19 - 1)).encode()).decode().rstrip("=")
    return f"{user}.{c.of(URL64, 6)}.{c.of(URL64, c.choice((27, 38)))}"


def jwt(c: Chance) -> str:
    algorithm = c.choice(("HS256", "RS256", "ES512"))
    header = f'{{"alg":"{algorithm}","typ":"JWT"}}'
    claims = f'{{"sub":"{c.of(DIGITS, 10)}","name":"{c.of(LOWER, 6)}","iat":{c.of(DIGITS, 10)}}}'
    parts = [base64.urlsafe_b64encode(text.encode()).decode() for text in (header, claims)]
    return ".".join([*(part.rstrip("=") for part in parts), c.of(URL64, 43)])


def pem(c: Chance) -> str:
    label = c.choice(("RSA PRIVATE KEY", "PRIVATE KEY", "EC PRIVATE KEY", "OPENSSH PRIVATE KEY"))
    lines = "\n".join(c.of(BASE64, 64) for _ in range(c.randint(2, 12)))
    return f"-----BEGIN {label}-----\n{lines}\n{c.of(BASE64, 22)}==\n-----END {label}-----"


def slack(c: Chance) -> str:
    team, user = c.of(DIGITS, 10, 13), c.of(DIGITS, 10, 13)
    return c.choice(
        (
            f"xoxb-{team}-{user}-{c.of(ALNUM, 24)}",
            f"xoxp-{team}-{user}-{c.of(DIGITS, 12)}-{c.of(HEX, 32)}",
            f"xoxs-{c.of(DIGITS, 11)}-{c.of(DIGITS, 11)}-{c.of(DIGITS, 11)}-{c.of(HEX, 10)}",
            f"xoxa-2-{c.of(ALNUM, 32)}",
            f"xapp-1-A{c.of(UPPER + DIGITS, 10)}-{team}-{c.of(HEX, 64)}",
            f"xoxe.xoxp-1-{c.of(UPPER + DIGITS, 163)}",
        )
    )


def openai(c: Chance) -> str:
    project = c.choice(("proj", "svcacct", "admin"))
    return c.choice(
        (
            f"sk-{c.of(ALNUM, 20)}T3BlbkFJ{c.of(ALNUM, 20)}",
            f"sk-{project}-{c.of(URL64, 74)}T3BlbkFJ{c.of(URL64, 74)}",
        )
    )


def fixed(
    *shapes: Sequence[str | tuple[str, int] | tuple[str, int, int]],
) -> Callable[[Chance], str]:
    """One of the shapes: literal texts, and alphabets with how many of them."""

    def make(c: Chance) -> str:
        parts = c.choice(shapes)
        return "".join(part if isinstance(part, str) else c.of(*part) for part in parts)

    return make


TOKENS: dict[str, Callable[[Chance], str]] = {
    "aws_key": fixed(
        *((prefix, (UPPER + "234567", 16)) for prefix in ("AKIA", "ASIA", "ABIA", "ACCA"))
    ),
    "github_token": fixed(
        *((f"gh{letter}_", (ALNUM, 36)) for letter in "pousr"),
        ("github_pat_", (ALNUM, 22), "_", (ALNUM, 59)),
    ),
    "gitlab_token": fixed(
        ("glpat-", (URL64, 20)), ("gldt-", (URL64, 20)), ("glrt-", (URL64, 20)),
        ("glptt-", (HEX, 40)), ("glft-", (URL64, 20)), ("glsoat-", (URL64, 20)),
        ("glimt-", (URL64, 25)), ("gloas-", (URL64, 64)), ("GR1348941", (URL64, 20)),
        ("glagent-", (URL64, 50)), ("glcbt-1_", (URL64, 20)),
        ("glpat-", (URL64, 27), ".01.", (LOWER + DIGITS, 9)),
    ),
    "slack_token": slack,
    "google_key": fixed(
        ("AIza", (URL64, 35)), ("GOCSPX-", (URL64, 28)), ("ya29.", (URL64, 60, 160))
    ),
    "stripe_key": fixed(
        ("sk_live_", (ALNUM, 24)), ("rk_live_", (ALNUM, 24)), ("sk_test_", (ALNUM, 99)),
        ("rk_test_", (ALNUM, 24)), ("whsec_", (ALNUM, 32)),
    ),
    "anthropic_key": fixed(
        ("sk-ant-api03-", (URL64, 93), "AA"), ("sk-ant-admin01-", (URL64, 93), "AA")
    ),
    "openai_key": openai,
    "huggingface_token": fixed(("hf_", (LOWER + UPPER, 34)), ("api_org_", (LOWER + UPPER, 34))),
    "npm_token": fixed(("npm_", (ALNUM, 36))),
    "pypi_token": fixed(
        ("pypi-AgEIcHlwaS5vcmc", (URL64, 130, 180)),
        ("pypi-AgENdGVzdC5weXBpLm9yZw", (URL64, 130, 180)),
    ),
    "rubygems_key": fixed(("rubygems_", (HEX, 48))),
    "sendgrid_key": fixed(("SG.", (URL64, 22), ".", (URL64, 43))),
    "twilio_key": fixed(("SK", (HEX, 32))),
    "discord_token": discord,
    "telegram_token": fixed(((DIGITS[1:], 1), (DIGITS, 7, 9), ":AA", (URL64, 33))),
    "digitalocean_token": fixed(*((f"do{x}_v1_", (HEX, 64)) for x in "por")),
    "mailgun_key": fixed(("key-", (HEX, 32))),
    "mailchimp_key": fixed(((HEX, 32), "-us", (DIGITS[1:], 1, 2))),
    "shopify_token": fixed(*((f"shp{x}_", (HEX, 32)) for x in ("at", "ca", "pa", "ss"))),
    "square_token": fixed(
        ("sq0atp-", (URL64, 22)), ("sq0csp-", (URL64, 43)), ("EAAA", (URL64, 60))
    ),
    "facebook_token": fixed(("EAAC", (ALNUM, 150, 200)), ("EAAM", (ALNUM, 100, 180))),
    "databricks_token": fixed(("dapi", (HEX, 32)), ("dapi", (HEX, 32), "-2")),
    "linear_key": fixed(("lin_api_", (ALNUM, 40)), ("lin_oauth_", (HEX, 64))),
    "notion_token": fixed(("ntn_", (DIGITS, 11), (ALNUM, 35)), ("secret_", (ALNUM, 43))),
    "postman_key": fixed(("PMAK-", (HEX, 24), "-", (HEX, 34))),
    "grafana_token": fixed(("glsa_", (ALNUM, 32), "_", (HEX, 8)), ("glc_", (BASE64, 40, 200))),
    "doppler_token": fixed(
        ("dp.pt.", (ALNUM, 43)), ("dp.ct.", (ALNUM, 43)), ("dp.st.dev.", (ALNUM, 43)),
        ("dp.sa.", (ALNUM, 43)),
    ),
    "vault_token": fixed(
        ("hvs.", (URL64, 90, 120)), ("hvb.", (URL64, 138, 200)), ("hvs.", (ALNUM, 24))
    ),
    "terraform_token": fixed(((ALNUM, 14), ".atlasv1.", (URL64, 67))),
    "atlassian_token": fixed(("ATATT3", (URL64, 177), "=", (HEX, 8)), ("ATBB", (ALNUM, 32))),
    "azure_secret": fixed(((ALNUM, 3), (DIGITS, 1), "Q~", (ALNUM + "_~.-", 33), (ALNUM, 1))),
    "newrelic_key": fixed(
        ("NRAK-", (UPPER + DIGITS, 27)), ("NRII-", (URL64, 32)), ("NRJS-", (HEX, 19))
    ),
    "sentry_token": fixed(
        ("sntryu_", (HEX, 64)), ("sntrys_eyJ", (ALNUM, 120, 180), "_", (ALNUM, 43))
    ),
    "brevo_key": fixed(("xkeysib-", (HEX, 64), "-", (ALNUM, 16))),
    "pulumi_token": fixed(("pul-", (HEX, 40))),
    "planetscale_token": fixed(*((f"pscale_{x}_", (URL64, 43)) for x in ("tkn", "oauth", "pw"))),
    "dynatrace_token": fixed(("dt0c01.", (UPPER + DIGITS, 24), ".", (UPPER + DIGITS, 64))),
    "artifactory_key": fixed(("AKCp", (ALNUM, 69)), ("cmVmd", (ALNUM, 59))),
    "onepassword_key": fixed(("ops_eyJ", (BASE64, 250, 800))),
    "age_key": fixed(("AGE-SECRET-KEY-1", ("QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L", 58))),
    "alibaba_key": fixed(("LTAI", (ALNUM, 20))),
    "flyio_token": fixed(("fo1_", (URL64, 43)), ("fm2_", (BASE64, 200, 500))),
    "perplexity_key": fixed(("pplx-", (ALNUM, 48))),
    "groq_key": fixed(("gsk_", (ALNUM, 52))),
    "replicate_token": fixed(("r8_", (ALNUM, 37))),
    "xai_key": fixed(("xai-", (ALNUM, 80))),
    "easypost_key": fixed(("EZAK", (ALNUM, 54)), ("EZTK", (ALNUM, 54))),
    "shippo_token": fixed(("shippo_live_", (HEX, 40)), ("shippo_test_", (HEX, 40))),
    "prefect_key": fixed(("pnu_", (ALNUM, 36)), ("pnb_", (ALNUM, 36))),
    "readme_key": fixed(("rdme_", (LOWER + DIGITS, 70))),
    "cloudflare_key": fixed(("v1.0-", (HEX, 24), "-", (HEX, 146))),
    "heroku_key": fixed(("HRKU-AA", (URL64, 58))),
    "jwt": jwt,
}  # fmt: skip
"""Keys that say by themselves what they are."""


@dataclass(frozen=True)
class Named:
    """Keys that only the name before them tells."""

    names: tuple[str, ...]
    make: Callable[[Chance], str]


def password(c: Chance) -> str:
    """Letters and digits and a mark or two, as people and password managers make them."""
    while True:
        text = c.of(ALNUM + "!#@*-_^&+", 10, 24)
        if any(x in DIGITS for x in text) and any(x.isalpha() for x in text) and text[0].isalnum():
            return text


NAMED: dict[str, Named] = {
    "aws_secret": Named(
        ("aws_secret_access_key", "AWS_SECRET_ACCESS_KEY", "secretAccessKey", "aws.secret.key"),
        fixed(((BASE64, 40),)),
    ),
    "azure_key": Named(
        ("AccountKey", "AZURE_STORAGE_KEY", "storage_account_key", "SharedAccessKey"),
        fixed(((BASE64, 86), "=="), ((BASE64, 43), "=")),
    ),
    "heroku_key": Named(("HEROKU_API_KEY", "heroku_auth_token", "herokuApiKey"), Chance.uuid),
    "datadog_key": Named(
        ("DATADOG_API_KEY", "datadog_app_key", "DD_API_KEY", "datadogApiKey"),
        fixed(((HEX, 32),), ((HEX, 40),)),
    ),
    "cloudflare_key": Named(
        ("CLOUDFLARE_API_KEY", "cloudflare_api_token", "CF_API_TOKEN"),
        fixed(((HEX, 37),), ((URL64, 39), (ALNUM, 1))),
    ),
    "twilio_key": Named(
        ("TWILIO_AUTH_TOKEN", "twilio_token", "twilioAuthToken"), fixed(((HEX, 32),))
    ),
    "mailgun_key": Named(
        ("MAILGUN_API_KEY", "mailgun_key"), fixed(((HEX, 32), "-", (HEX, 8), "-", (HEX, 8)))
    ),
    "password": Named(
        ("api_key", "API_KEY", "apiKey", "client_secret", "SECRET_KEY_BASE", "auth-token",
         "db.password", "private_token", "X_AUTH_TOKEN"),
        fixed(((HEX, 32),), ((HEX, 40),), ((HEX, 64),), ((ALNUM, 32),), ((BASE64, 43), "=")),
    ),
}  # fmt: skip

ANYWHERE = {
    "env": "HOST=localhost\n{NAME}={}\nPORT=8080\n",
    "yaml": "service:\n  {name}: {}\n  replicas: 3\n",
    "json": '{{"region": "eu-west-1", "{name}": "{}", "retries": 5}}\n',
    "json in json": '{{"body": "{{\\"{name}\\": \\"{}\\"}}"}}\n',
    "python": 'client = Client()\n{name} = "{}"\nclient.login({name})\n',
    "c++": 'static const char* k_{name} = "{}";\n',
    "shell": "set -eu\nexport {NAME}='{}'\n./deploy\n",
    "shell, bare": "{NAME}={} ./deploy --now\n",
    "terraform": 'provider "x" {{\n  {name}   = "{}"\n}}\n',
    "ci": "env:\n  - {NAME}: '{}'\nsteps: []\n",
    "ini": "[default]\n{name} = {}\nregion = eu-central-1\n",
    "comment": "// old {name}: {}\nint x = 1;\n",
    "php": "<?php return ['{name}' => '{}'];\n",
}  # fmt: skip
UNNAMED = {
    "prose": "Do not use {} any more, it was shared.\n",
    "url": "curl 'https://api.host.org/v1/me?x={}&y=2'\n",
    "header": 'curl -H "X-Header: {}" https://api.host.org\n',
    "npmrc": "//registry.npmjs.org/:_authToken={}\n",
    "pypirc": "[pypi]\nusername = __token__\npassword = {}\n",
    "netrc": "machine api.host.org login me password {}\n",
    "list": '["{}"]\n',
    "markdown": "- `{}` is for staging\n",
    "escaped": '"first line\\n{}\\nlast line"\n',
    "call": "connect('{}')\n",
    "end": "{}",
}  # fmt: skip

PASSWORDS = {
    "env": "DB_PASSWORD={}\n",
    "python": 'password = "{}"\n',
    "json": '{{"user": "sa", "password": "{}"}}\n',
    "yaml": "db:\n  password: '{}'\n",
    "netrc": "machine db.host.org\n  login app\n  password {}\n",
    "java": 'props.dbPassword = "{}";\n',
}  # fmt: skip

MADE_UP = (
    "YOUR_API_KEY", "your-token-here-1", "xxxxxxxxxxxxxxxx1", "${TOKEN_1}", "$TOKEN_1", "<token-1>",
    "{{ secrets.TOKEN_1 }}", "changeme123", "%(token)s_12", "REPLACE_ME_2024", "example-key-123",
    "0123456789abcdef0123456789abcdef", "000102030405060708090a0b0c0d0e0f", "deadbeefdeadbeef",
    "aaaaaaaaaaaaaaaa1111", "1234567890abcdef", "dummy_token_42", "test1234", "fake-key-0001",
    "abcdefghijklmnopqrstuvwxyz012345", "AKIAIOSFODNN7EXAMPLE",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "****************", "None", "placeholder1",
)  # fmt: skip
"""What documents and tests have in the place of a secret."""


def harmless(c: Chance) -> list[str]:
    """Texts without a secret, of things that have long words in them."""
    sha1, sha256, uuid = c.of(HEX, 40), c.of(HEX, 64), c.uuid()
    image = base64.b64encode(c.randbytes(300)).decode()
    return [
        f"commit {sha1}\nAuthor: A\n",
        f"{sha256}  archive.tar.gz\n",
        f'id: {uuid}\nrequest_id = "{uuid}"\n',
        f'token_hash = "{sha256}"\n',
        f"password_hash: {sha256}\napi_key_fingerprint = '{c.of(HEX, 32)}'\n",
        f'"secret_id": "{uuid}", "token_type": "Bearer2", "token_url": "https://h.org/oauth2/a"\n',
        f'PASSWORD_SHA256={sha256}\ndigest = "sha256:{sha256}"\n',
        f'<img src="data:image/png;base64,{image}">\n',
        f'"integrity": "sha512-{base64.b64encode(c.randbytes(64)).decode()}",\n',
        f'resolved "https://registry.yarnpkg.com/a/-/a-1.2.{c.randint(0, 99)}.tgz#{sha1}"\n',
        f'checksum = "{sha256}"\nname = "serde"\nversion = "1.0.{c.randint(0, 300)}"\n',
        f"--hash=sha256:{sha256} \\\n",
        f"function a(e,t){{return e.token=t.k2,e.secret=n({c.randint(0, 99)}),r.password=o[2]}}\n",
        'api_key = os.environ["API_KEY_2"]\ntoken = os.getenv("TOKEN_V2", None)\n',
        "password: ${{ secrets.DB_PASSWORD_2 }}\ntoken: !vault key2\n",
        "TOKEN=$(vault read -field=value secret/app2)\nexport SECRET=${SECRET_2:-}\n",
        "token = next_token2(stream)\npassword = form.cleaned_data2['password']\n",
        "std::string token = tokens[k2].text;\nauto secret = Secret::from_bytes32(x);\n",
        "git clone git@github.com:owner/project2.git && cd project2\n",
        "origin  ssh://git@gitlab.host.org:2222/owner/project.git (fetch)\n",
        "https://user@host.org/path https://user:password@host.org http://a:b@host.org:80\n",
        "postgres://${USER}:${PASS_1}@db:5432/app redis://:@cache:6379/0 amqp://u:<pw1>@h\n",
        f"key = bytes.fromhex('{c.of(HEX, 64)}')  # test vector\n",
        f"uint64_t k = 0x{c.of(HEX, 16)}ULL; // {c.of(HEX, 16)}\n",
        f"-----BEGIN CERTIFICATE-----\n{image[:64]}\n-----END CERTIFICATE-----\n",
        f"-----BEGIN PUBLIC KEY-----\n{image[:64]}\n-----END PUBLIC KEY-----\n",
        "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----\n",
        f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA{c.of(BASE64, 43)} me\n",
        f"https://discord.com/channels/{c.of(DIGITS, 18)}/{c.of(DIGITS, 18)}\n",
        "https://hooks.slack.com/services/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX\n",
        f"eyJ{c.of(ALNUM, 40)} sk-learn-contrib-package-name dapi_{c.of(LOWER, 32)}\n",
        f"class='sk-folding-cube sk-cube{c.randint(1, 4)}-loader' id='hf_config_value_name'\n",
    ]


def near(make: Callable[[Chance], str], c: Chance) -> str:
    """Something almost like a key: too short, part of a word, of one character, of a wrong byte."""
    text = make(c).removeprefix("xoxe.")  # what is left is a token too
    stem = text[:3]
    return c.choice(
        (
            stem + c.of(ALNUM, 8),
            "Z" + text,
            text[:12],
            stem + "x" * (len(text) - 3),
            text.swapcase(),
            "_" + text,
        )
    )


@dataclass(frozen=True)
class Leak:
    """A text, and its secrets: kind, begin and end, in bytes."""

    text: bytes
    spans: tuple[tuple[str, int, int], ...]
    surroundings: str = ""


def _fill(frame: str, name: str, text: str) -> str:
    return frame.format(text, name=name, NAME=name.upper().replace("-", "_").replace(".", "_"))


def _leak(kind: str, frame: str, secret: str, where: str, name: str = "setting") -> Leak:
    before, after = _fill(frame, name, "\0").encode().split(b"\0")
    text = before + secret.encode() + after
    return Leak(text, ((kind, len(before), len(before) + len(secret)),), where)


def leaks(kind: str, c: Chance) -> Iterator[Leak]:
    """Texts with one secret of this kind, without end."""
    while True:
        named = NAMED.get(kind)
        if kind == "password" and c.random() < 0.5:
            where = c.choice(list(PASSWORDS))
            yield _leak(kind, PASSWORDS[where], password(c), where)
        elif kind in TOKENS and (named is None or c.random() < 0.5):
            where = c.choice([*ANYWHERE, *UNNAMED])
            name = c.choice(("setting", "token", "api_key", "value"))
            yield _leak(kind, {**ANYWHERE, **UNNAMED}[where], TOKENS[kind](c), where, name)
        elif named is not None:
            frames = dict(ANYWHERE)
            if kind == "azure_key":
                frames["connection"] = (
                    '"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};'
                    'EndpointSuffix=core.windows.net"\n'
                )
            where = c.choice(list(frames))
            yield _leak(kind, frames[where], named.make(c), where, c.choice(named.names))
        elif kind == "private_key":
            text = pem(c)
            where = c.choice(("file", "json", "yaml", "python"))
            frame = {
                "file": "{}\n",
                "json": '{{"type": "service_account", "private_key": "{}\\n"}}',
                "yaml": "key: |\n  {}\n",
                "python": 'KEY = """{}"""\n',
            }[where]
            yield _leak(kind, frame, text.replace("\n", "\\n" if where == "json" else "\n"), where)
        elif kind == "url_password":
            scheme = c.choice(("https", "postgres", "mongodb+srv", "redis", "amqp", "mysql"))
            host = c.choice(
                ("db.host.org:5432/app", "localhost/x", "10.0.0.5:6379", "git.host.org/a.git")
            )
            frame = c.choice(("DATABASE_URL={}\n", 'url = "{}"\n', "git clone {}\n", "see {} .\n"))
            secret = password(c).replace("@", "7").replace("#", "8").replace("&", "9")
            user = c.choice(("app", "admin", "deploy-bot", ""))
            yield _leak(kind, frame.format(f"{scheme}://{user}:{{}}@{host}"), secret, "url")
        elif kind == "slack_webhook":
            team, hook = c.of(UPPER + DIGITS, 8, 10), c.of(UPPER + DIGITS, 8, 10)
            secret = f"hooks.slack.com/services/T{team}/B{hook}/{c.of(ALNUM, 24)}"
            yield _leak(
                kind, c.choice(("curl https://{}\n", '"url": "https://{}",\n')), secret, "url"
            )
        elif kind == "discord_webhook":
            host = c.choice(("discord.com", "discordapp.com", "ptb.discord.com"))
            secret = f"{host}/api/webhooks/{c.of(DIGITS, 18, 19)}/{c.of(URL64, 68)}"
            yield _leak(kind, c.choice(("HOOK=https://{}\n", "'https://{}'\n")), secret, "url")
        elif kind == "teams_webhook":
            secret = (
                f"{c.of(LOWER, 8)}.webhook.office.com/webhookb2/{c.uuid()}@{c.uuid()}"
                f"/IncomingWebhook/{c.of(HEX, 32)}/{c.uuid()}"
            )
            yield _leak(kind, c.choice(("HOOK=https://{}\n", "'https://{}'\n")), secret, "url")
        else:
            raise KeyError(kind)


def look_alikes(kind: str, c: Chance) -> Iterator[Leak]:
    """Texts without a secret that have something like this kind, without end."""
    while True:
        if kind in TOKENS and c.random() < 0.6:
            where = c.choice(("prose", "list", "call", "end", "markdown"))
            yield Leak(_fill(UNNAMED[where], "", near(TOKENS[kind], c)).encode(), (), where)
            continue
        where = c.choice(list(ANYWHERE))
        text = c.choice(MADE_UP)
        name = c.choice(NAMED[kind].names if kind in NAMED else ("api_key", "token", "password"))
        if kind in NAMED and c.random() < 0.5:
            name = c.choice((f"{name}_hash", f"{name}-id", f"public_{name}", f"{name}Fingerprint"))
            text = NAMED[kind].make(c)
        yield Leak(_fill(ANYWHERE[where], name, text).encode(), (), where)


def generated(seed: int = 27, each: int = EACH) -> list[Leak]:
    """All texts: for each kind so many with a secret and so many without, and harmless ones."""
    texts = []
    for number, kind in enumerate(SECRETS):
        c = Chance(1000 * seed + number)
        for make in (leaks, look_alikes):
            source = make(kind, c)
            texts += [next(source) for _ in range(each)]
    c = Chance(seed)
    for _ in range(max(each // 4, 1)):
        texts += [Leak(text.encode(), (), "harmless") for text in harmless(c)]
    return texts


def column(texts: Sequence[bytes]) -> Documents:
    at = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    data = byte_buffer(int(at[-1]))
    data[: at[-1]] = np.frombuffer(b"".join(texts), np.uint8)
    offsets = np.zeros(len(texts), np.int64)
    return Documents(data, at, offsets, offsets)


@dataclass(frozen=True)
class Score:
    """How many secrets of a kind there are, were found to the byte, and were found wrongly."""

    planted: int
    found: int
    wrong: int

    @property
    def recall(self) -> float:
        return self.found / self.planted

    @property
    def precision(self) -> float:
        return self.found / max(self.found + self.wrong, 1)


def scores(texts: Sequence[Leak]) -> tuple[dict[str, Score], list[tuple[str, str, Leak]]]:
    """The score of each kind, and what was missed and wrong."""
    documents = column([leak.text for leak in texts])
    found = find(documents, pii=False)
    rows = np.searchsorted(documents.at, found.start, side="right") - 1
    begin = found.start - documents.at[rows]
    end = found.end - documents.at[rows]
    spans = {
        (int(row), KINDS[kind], int(a), int(b))
        for row, kind, a, b in zip(rows, found.kind, begin, end, strict=True)
    }
    planted = {(row, *span) for row, leak in enumerate(texts) for span in leak.spans}
    right = Counter(kind for _, kind, *_ in planted & spans)
    wrong = Counter(kind for _, kind, *_ in spans - planted)
    total = Counter(kind for _, kind, *_ in planted)
    faults = [("missed", kind, texts[row]) for row, kind, *_ in sorted(planted - spans)]
    faults += [
        (f"wrong {texts[row].text[a:b]!r}", kind, texts[row])
        for row, kind, a, b in sorted(spans - planted)
    ]
    return {kind: Score(total[kind], right[kind], wrong[kind]) for kind in SECRETS}, faults


BY_EYE = {
    "slack_webhook": "`https://hooks.slack.com/services/…`",
    "discord_webhook": "`https://discord.com/api/webhooks/…`",
    "teams_webhook": "`https://….webhook.office.com/webhookb2/…`",
    "mailchimp_key": "`…-us12`",
    "terraform_token": "`….atlasv1.…`",
    "azure_secret": "`…8Q~…`",
    "telegram_token": "`123456789:AA…`",
    "discord_token": "`M…`, `N…`, `O…` with two dots, `mfa.…`",
    "private_key": "`-----BEGIN … PRIVATE KEY-----`, in JSON too",
    "url_password": "`scheme://user:…@host`",
    "password": "a value behind the name of a password, key or token; `Bearer …`; .netrc",
}


def looks(kind: str) -> str:
    """How a kind is told, for the documentation."""
    if kind in BY_EYE:
        return BY_EYE[kind]
    shapes = [shape for name, *shapes in secrets_layout.TOKENS if name == kind for shape in shapes]
    starts = list(dict.fromkeys(shape.split()[0] + "…" for shape in shapes))
    names = [name for known, name, *_ in secrets_layout.ASSIGNED if known == kind]
    words = [f"behind {', '.join(name.split())}" for name in names]
    return "; ".join([*([", ".join(f"`{start}`" for start in starts)] if starts else []), *words])


def main() -> None:
    each = int(sys.argv[1]) if len(sys.argv) > 1 else EACH
    table, faults = scores(generated(each=each))
    print("| kind | looks like | recall | precision |\n|---|---|---|---|")
    for kind, score in table.items():
        print(f"| `{kind}` | {looks(kind)} | {score.recall:.3f} | {score.precision:.3f} |")
    for what, kind, leak in faults if "--faults" in sys.argv else ():
        print(what, kind, leak.surroundings, leak.text)


if __name__ == "__main__":
    main()
