"""What is left out of the frozen code by its name, and what must not be."""

from __future__ import annotations

import pytest

from hpc_trainer.record.redaction import is_secret

_SECRETS = """
.env .ENV .Env.local prod.env PROD.ENV .env.production .env-prod .envrc .flaskenv server.pem KEY.PEM tls.key TLS.KEY
store.p12 Store.PFX AuthKey_1.p8 release.jks debug.keystore vault.kdbx putty.ppk mail.gpg work.ovpn me.keytab
id_rsa ID_RSA id_rsa.bak id_rsa.old id_rsa~ id_ed25519 id_ed25519.pub id_ed25519_sk id_ecdsa-cert.pub id_work
deploy_key Deploy-Key deploy_key.old deploy_key.txt ssh_host_rsa_key ssh-key private_key private_key.txt
PrivateKey.txt api_key.txt API_KEY api-key.json apikey.txt ApiKeys.yaml api_keys.yml openai_key.txt OPENAI_API_KEY
wandb_api_key .wandb_api_key wandb_key.txt aws_access_keys.csv secret_key secret-key.txt master.key jwt_key
service-account.json service_account.json Service-Account-Prod.json serviceaccount.json service_account_key.json
my-firebase-adminsdk-x1.json gcp-key.json google_credentials.json application_default_credentials.json
client_secret.json client_secret_12.apps.googleusercontent.com.json credentials Credentials.json credentials.csv
aws_credentials aws-credentials.txt db_creds.yaml creds.txt credentials_prod.json .git-credentials .smbcredentials
Secrets.yaml secrets.py SECRETS.toml secrets secret.txt .secret .secrets my_secrets.yaml secrets-prod.yml
client-secret.txt db_password.txt Password passwords.txt passwd .htpasswd passphrase.txt .vault_pass vault_pass.txt
token Token.txt token.json hf_token hf_token.txt .hf_token HF-TOKEN access_token access_token.json refresh_token.txt
github_token.txt x.token .vault-token .netrc .NETRC _netrc .authinfo .pypirc .npmrc .pgpass pgpass.conf .my.cnf .s3cfg
.boto .dockercfg .databrickscfg kaggle.json kubeconfig KubeConfig.yaml prod.kubeconfig prod.tfvars terraform.tfstate
.bash_history .python_history .comet.config clearml.conf keyfile keyfile.json
"""
_CODE = """
secrets_utils.py tokenizer.json tokens.py tokens.txt keyboard.py key.py keys.py api_key.py api_keys.py password.py
passwords.py tokenizer.py tokenizer_config.json special_tokens_map.json added_tokens.json tokenizer.model token_ids.npy
token_counts.json vocab.json merges.txt environment.py environment.yaml environment.yml env.py envs.py secretary.py
secretary.txt credentials_dialog.py key_value_store.py keys.json turkey.txt monkey.json keypoints.json key_points.txt
id_map.py id_list.txt id_to_name.json public_keys.md docs_api_key.md private.py service_account.py service.json
account.yaml primary_key.sql foreign_key.yaml config.yaml conf.json requirements.txt attention_key.pt bearer.yaml
password_strength.md history.py training_history.json secret_sharing.yaml secret_santa.csv README.md Makefile setup.cfg
next_token.json last_token.yaml num_tokens.yaml by_token.csv key_frames.yaml
token.py secret.py keyfile.py kubeconfig.py training_history hotkey.yaml
envelope.yaml .env.example .env.sample .env.template .env.dist config.yaml.example
"""
SECRETS, CODE = _SECRETS.split(), _CODE.split()


def test_there_are_many() -> None:
    assert len(set(SECRETS)) >= 100
    assert len(set(CODE)) >= 50


@pytest.mark.parametrize("folder", ["", "my_lab/conf/"])
def test_secrets_are_known_by_their_names(folder: str) -> None:
    assert [name for name in SECRETS if not is_secret(folder + name)] == []


@pytest.mark.parametrize("folder", ["", "my_lab/conf/"])
def test_code_and_data_are_not(folder: str) -> None:
    assert [name for name in CODE if is_secret(folder + name)] == []


@pytest.mark.parametrize("folder", [".ssh", ".AWS", ".gnupg", ".docker", ".kube", "Secrets", "credentials"])
def test_what_lies_in_a_folder_of_secrets_is_one(folder: str) -> None:
    assert is_secret(f"my_lab/{folder}/config")
    assert is_secret(f"my_lab/{folder}/config.example")
