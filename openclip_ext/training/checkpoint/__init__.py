"""Checkpoints: their format, saving, finding and restoring."""

from openclip_ext.training.checkpoint.finding import Start as Start
from openclip_ext.training.checkpoint.finding import find_start as find_start
from openclip_ext.training.checkpoint.finding import scan as scan
from openclip_ext.training.checkpoint.format import LATEST as LATEST
from openclip_ext.training.checkpoint.format import Checkpoint as Checkpoint
from openclip_ext.training.checkpoint.format import Position as Position
from openclip_ext.training.checkpoint.format import RunIdentity as RunIdentity
from openclip_ext.training.checkpoint.format import checkpoint_name as checkpoint_name
from openclip_ext.training.checkpoint.format import checksum as checksum
from openclip_ext.training.checkpoint.format import random_state as random_state
from openclip_ext.training.checkpoint.format import read as read
from openclip_ext.training.checkpoint.format import set_random_state as set_random_state
from openclip_ext.training.checkpoint.restoring import changed_settings as changed_settings
from openclip_ext.training.checkpoint.restoring import check_identity as check_identity
from openclip_ext.training.checkpoint.restoring import cut_logs as cut_logs
from openclip_ext.training.checkpoint.restoring import lacks_evaluation as lacks_evaluation
from openclip_ext.training.checkpoint.restoring import load_model as load_model
from openclip_ext.training.checkpoint.restoring import restore as restore
from openclip_ext.training.checkpoint.restoring import restore_ema as restore_ema
from openclip_ext.training.checkpoint.restoring import restore_loss as restore_loss
from openclip_ext.training.checkpoint.saving import remove as remove
from openclip_ext.training.checkpoint.saving import remove_leftovers as remove_leftovers
from openclip_ext.training.checkpoint.saving import remove_older_mid_epoch as remove_older_mid_epoch
from openclip_ext.training.checkpoint.saving import save as save
from openclip_ext.training.checkpoint.saving import save_model_file as save_model_file
from openclip_ext.training.checkpoint.saving import set_aside as set_aside
